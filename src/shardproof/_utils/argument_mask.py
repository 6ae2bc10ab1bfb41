"""Masks what looks like a secret in the arguments of a program, for a record that others read.

Note "What is masked": a value whose name has a word such as ``token`` or ``key``. The value is what follows
``=`` or ``:``, or the arguments up to the next option. In a URL, the user with the password, and everything
behind a signature. A text with the form of a known token. Too much is masked rather than too little:
``--num-key-value-heads 8`` also loses its value.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

MASK = "***"
_LONGEST = 1000
"""Characters of an argument that are kept, at most."""

_SECRET = r"(?:token(?!i[sz])|key|secret|passw|passphrase|pwd|credential|auth(?!or))"
_IS_SECRET = re.compile(_SECRET, re.IGNORECASE)
_NAME = re.compile(r"-{0,2}[\w.-]+")
_PATTERNS = (
    # Tokens of Hugging Face, GitHub, GitLab, OpenAI, Slack and AWS, and JSON web tokens.
    re.compile(
        r"()(?<![A-Za-z0-9])(?:hf_|gh[a-z]_|github_pat_|glpat-|sk-|xox[a-z]-|AKIA|ASIA|eyJ)[\w.-]{8,}(?s:.*)"
    ),
    re.compile(r"(\b(?:bearer|basic)\s).+", re.IGNORECASE | re.DOTALL),
    re.compile(r"(://)[^/\s]*(?=@)"),
    re.compile(r"([?&;][\w.-]*sig(?:nature)?=).+", re.IGNORECASE | re.DOTALL),
    re.compile(rf"({_SECRET}[\w.\]'\"-]*\s*[=:]).+", re.IGNORECASE | re.DOTALL),
)


def mask_arguments(arguments: Iterable[str]) -> list[str]:
    """The arguments of a program without what looks like a secret; see "What is masked".

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
        is_option = argument.startswith("--" if is_first else "-")
        if expects and not is_option:
            found.append(MASK)
            is_first = False
            continue
        text = argument if len(argument) <= _LONGEST else f"{argument[:_LONGEST]}..."
        for pattern in _PATTERNS:
            text = pattern.sub(rf"\g<1>{MASK}", text)
        found.append(text)
        expects = is_first = _NAME.fullmatch(argument) is not None and bool(_IS_SECRET.search(argument))
    return found
