"""Prepare the text of the comparisons: a folder for each objective, and one of a single domain for runs that repeat it.

    python -m evidence.prepare TEXT [--more TEXT] [--out FOLDER]

TEXT has DOMAIN.train.jsonl.xz and DOMAIN.valid.jsonl.xz for each domain of docs/results/corpus.md. The folders are
corpus, corpus-causal and corpus-ul2, which are prepared at the same time, and then corpus-arxiv with the tokenizer of
corpus. --more is a folder of DOMAIN.train.*.jsonl.xz of other domains; with it, corpus-wide is prepared too: the
training text of both, of which 2% is held out, with the same tokenizer. Complete folders are left alone.
"""

import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

DOMAINS = ("wikipedia", "books", "web", "arxiv", "code")
VOCABULARY = 8192


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("text", type=Path, help="the folder with the text of docs/results/corpus.md")
    parser.add_argument("--more", type=Path, help="a folder with more text for training, for corpus-wide")
    parser.add_argument("--out", type=Path, default=Path(), help="where the folders go (here)")
    options = parser.parse_args(arguments)
    missing = [path for domain in DOMAINS for path in _files(options.text, domain) if not path.is_file()]
    if missing:
        parser.error(f"text is {options.text}, but there is no {missing[0].name} in it")
    added = [] if options.more is None else sorted(options.more.glob("*.train.*.jsonl.xz"))
    if options.more is not None and not added:
        parser.error(f"more is {options.more}, but there is no DOMAIN.train.*.jsonl.xz in it")
    names = list(dict.fromkeys(file.name.split(".", 1)[0] for file in added))
    if both := [name for name in names if name in DOMAINS]:
        parser.error(f"more is {options.more}, with {both[0]}, which the other text has too; rename its files")
    trained = ["--vocabulary", str(VOCABULARY)]
    _prepare(
        [*trained, "--out", str(options.out / "corpus"), *_data(options.text, DOMAINS)],
        *(
            [*trained, "--objective", name, "--out", str(options.out / f"corpus-{name}"), *_data(options.text, DOMAINS)]
            for name in ("causal", "ul2")
        ),
    )
    tokenizer = ["--tokenizer", str(options.out / "corpus")]
    _prepare([*tokenizer, "--out", str(options.out / "corpus-arxiv"), *_data(options.text, ["arxiv"])])
    if added:
        text = {domain: _files(options.text, domain)[0] for domain in DOMAINS}
        text |= {domain: options.more / f"{domain}.train.*" for domain in names}
        wide = [option for domain, path in text.items() for option in ("--data", f"{domain}={path}")]
        _prepare([*tokenizer, "--out", str(options.out / "corpus-wide"), *wide])


def _files(text: Path, domain: str) -> tuple[Path, Path]:
    return text / f"{domain}.train.jsonl.xz", text / f"{domain}.valid.jsonl.xz"


def _data(text: Path, domains: Sequence[str]) -> list[str]:
    options = []
    for domain in domains:
        train, valid = _files(text, domain)
        options += ["--data", f"{domain}={train}", "--valid", f"{domain}={valid}"]
    return options


def _prepare(*commands: Sequence[str]) -> None:
    """Run `raptr prepare` with each list of options, all at the same time."""
    running = [subprocess.Popen([sys.executable, "-m", "raptr", "prepare", *command]) for command in commands]
    if failed := [process.args for process in running if process.wait()]:
        sys.exit(f"{len(failed)} of {len(running)} commands failed")


if __name__ == "__main__":
    main()
