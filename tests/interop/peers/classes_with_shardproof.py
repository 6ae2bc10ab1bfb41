"""The classes that `with_shardproof` makes: of a class that has it already, and of each package of Lightning.

Usage: classes_with_shardproof.py [PACKAGE ...], the packages of Lightning in the order of their import; none:
the trainer of transformers.
"""

from __future__ import annotations

import sys
from importlib import import_module


def strategies(packages: list[str]) -> None:
    modules = [import_module(f"{package}.strategies") for package in packages]
    from shardproof.frameworks.lightning import with_shardproof

    for module in modules:
        for kind in (module.DDPStrategy, module.SingleDeviceStrategy, module.ModelParallelStrategy):
            made = with_shardproof(kind)
            assert with_shardproof(made) is made
            assert made.__name__ == kind.__name__
            assert made.__mro__[2] is kind, "methods of the strategy follow ours, before those of its bases"
            strategy = object.__new__(kind)
            strategy.__class__ = made  # what the callback does
            assert strategy.restore_checkpoint_after_setup


def trainers() -> None:
    from transformers import Trainer

    from shardproof.frameworks.transformers import with_shardproof

    first = with_shardproof(Trainer)
    second = with_shardproof(first, background=False)
    assert (first.shardproof_background, second.shardproof_background) == (True, False)
    assert second.__mro__[:2] == (second, first)
    assert second.train is first.train is not Trainer.train


if __name__ == "__main__":
    if sys.argv[1:]:
        strategies(sys.argv[1:])
    else:
        trainers()
    print("classes are made")
