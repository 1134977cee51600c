"""Turns a tokenizer that comes without a tokenizer.json (sentencepiece's tokenizer.model, vocab.json with merges.txt)
into one, through transformers.

Owns which files count as such a tokenizer, and the refusals where it cannot be had. Invariant: a model is never trained
on other ids than those it has learned: where its tokenizer is missing or cannot be read, nothing is guessed.
"""

from __future__ import annotations

from pathlib import Path

from shardwise.errors import UserError

SENTENCEPIECE = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
OTHERS = ("vocab.json", "vocab.txt", "merges.txt", "tiktoken.model")
INSTALL = "pip install 'shardwise[sentencepiece]'"


def find_files(directory: Path) -> list[str]:
    """Returns the names of the files that hold a tokenizer in another form than tokenizer.json."""
    return [name for name in (*SENTENCEPIECE, *OTHERS) if (directory / name).is_file()]


def as_tokenizer_json(directory: Path) -> bytes:
    """Returns the content of the tokenizer.json that stands for the tokenizer in this directory; refuses what cannot be
    converted here."""
    found = find_files(directory)
    try:
        from transformers import AutoTokenizer, logging
    except ImportError:
        raise _not_converted(directory, found, "transformers, which is not installed, would read it", INSTALL) from None
    if found[0] in SENTENCEPIECE:
        try:
            import sentencepiece  # noqa: F401 -- transformers reads the file with it, and says less clearly that it is missing
        except ImportError:
            why = "transformers reads it with sentencepiece, which is not installed"
            raise _not_converted(directory, found, why, INSTALL) from None
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
        return tokenizer.backend_tokenizer.to_str().encode()
    except Exception as error:  # whatever a damaged file makes its code raise
        said = f"transformers says: {str(error).strip().partition(chr(10))[0] or type(error).__name__}"
        fix = "data.tokenizer=PATH of a tokenizer.json made for this model"
        raise _not_converted(directory, found, said, fix) from None
    finally:
        logging.set_verbosity(before)


def _not_converted(directory: Path, found: list[str], why: str, fix: str) -> UserError:
    return UserError(f"cannot read the tokenizer {directory / found[0]}", why=why, fix=fix)


def no_tokenizer(directory: Path, vocab: int) -> UserError:
    """Returns the refusal of a model whose directory holds no tokenizer in any form."""
    return UserError(
        f"{directory} holds no tokenizer",
        why=f"the model has {vocab:,} token ids; text cut into bytes would be other ids than those it was trained on",
        fix="copy the model's tokenizer.json there, or data.tokenizer=PATH; data.tokenizer=bytes if you mean bytes",
    )
