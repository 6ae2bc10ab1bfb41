"""Masks what looks like a secret in the arguments of a program, for a record that others read.

Note "What is masked": a value whose name has a word such as ``token`` or ``key``. The value is what follows
``=``, ``:`` or a space in the argument, or the arguments up to the next option. In a URL, the user with the
password. A text with the form of a known token. Too much is masked rather than too little:
``--num-key-value-heads 8`` also loses its value.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

MASK = "***"
_LONGEST = 1000
"""Characters of a masked argument that are kept, at most."""
_MOST_READ = 1 << 16
"""Characters of an argument that are read, at most."""

_NAME = (
    r"(?:token(?!i[sz])|key|secret|pass(?!es|age|ive|through)|pwd|cred|auth(?!or(?!i))|signature|sig(?![a-z]))"
    r"[^\s=:/]{0,200}"
)
"""The name of a secret, from its word on."""
_ENDS_IN_NAME = re.compile(rf"[^/]*{_NAME}\s*[=:]?\s*", re.IGNORECASE)
_KNOWN_TOKENS = (
    *("hf_", "gh[a-z]_", "github_pat_", "glpat-", "sk-", "gsk_", "r8_", "nvapi-", "wandb_v1_"),
    *("npm_", "pypi-", "dckr_pat_", "AKIA", "ASIA", "AIza", r"ya29\.", "xox[a-z]-", "xapp-", "eyJ"),
    r"hooks\.slack\.com/services/",
)
"""How tokens begin: those of Hugging Face, GitHub, GitLab, OpenAI, Groq, Replicate, NVIDIA, Weights & Biases,
npm, PyPI, Docker, AWS, Google and Slack, JSON web tokens, and the webhooks of Slack."""
_PATTERNS = (
    re.compile(rf"()(?<![A-Za-z0-9])(?:{'|'.join(_KNOWN_TOKENS)})[\w.-]{{8,}}(?s:.*)"),
    re.compile(r"(\b(?:bearer|basic)\s).+", re.IGNORECASE | re.DOTALL),
    # A user and a password with any characters, up to the last "@".
    re.compile(r"(?<!\S)((?:(?!://)\S)*://)[^\s:]*:\S*(?=@)"),
    re.compile(r"(://)[^/\s]*(?=@)"),
    re.compile(rf"({_NAME}(?:\s*[=:]|\s)).+", re.IGNORECASE | re.DOTALL),
)
"""Each keeps its group, and masks the rest."""


def mask_arguments(arguments: Iterable[object]) -> list[str]:
    """The arguments of a program without what looks like a secret; see "What is masked".

    Args:
        arguments: those of `sys.argv`, which a program may fill with objects that are no `str`.

    >>> mask_arguments(["lr=0.1", "wandb.api_key=abc", "--hf-token", "abc", "--tokenizer", "gpt2"])
    ['lr=0.1', 'wandb.api_key=***', '--hf-token', '***', '--tokenizer', 'gpt2']
    >>> mask_arguments(["--data", "https://me:abc@host/x", "https://host/x?sig=abc&b=1"])
    ['--data', 'https://***@host/x', 'https://host/x?sig=***']
    """
    found = []
    expects = False
    """The argument before is the name of a secret, or a value of one."""
    is_first = False
    """The argument is the first behind that name."""
    for argument in arguments:
        text = str(argument)[:_MOST_READ]
        if expects and not text.startswith("--" if is_first else "-"):
            found.append(MASK)
            is_first = False
            continue
        expects = is_first = _ENDS_IN_NAME.fullmatch(text) is not None
        for pattern in _PATTERNS:
            text = pattern.sub(rf"\g<1>{MASK}", text)
        found.append(text if len(text) <= _LONGEST else f"{text[:_LONGEST]}...")
    return found
