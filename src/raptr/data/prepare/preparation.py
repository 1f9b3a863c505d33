"""Text to tokens: trains the tokenizer, splits the documents, and writes the folder that `store.py` reads.

    prepare_corpus   files, folders and datasets, one or several domains: `raptr prepare`
    prepare          documents in memory
    prepare_builtin  the built-in corpus, which every machine has

All three work alike. The documents are read twice and never all held in memory: first to check them and to sample
text for the tokenizer (`census.py`), then to encode them (`encoding.py`).

`prepare_corpus` works in `OUT.partial` and renames it to OUT at the end, so a folder OUT is always complete. When it
is killed and started again with the same request, it continues after the last entry of its journal and ends with the
same bytes. It repeats the first reading if that was not finished; with `deduplicate` it also reads, but does not
encode, the finished text again. With a changed request it starts over and says why. If another request made OUT, it
raises a ValueError.
"""

import json
import platform
import shutil
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import tokenizers

from raptr.data.order import CYCLE, quotas
from raptr.data.prepare.census import Sample, given_sides, sides_of, take_census
from raptr.data.prepare.corpus import Document, builtin, split
from raptr.data.prepare.domains import DomainSource, check_out
from raptr.data.prepare.encoding import Progress, encode
from raptr.data.prepare.journal import Journal
from raptr.data.prepare.reading import DocumentsInput
from raptr.data.prepare.request import HELD_OUT, SHARD_TOKENS, Request
from raptr.data.prepare.stream import BEGINNING, Chunk
from raptr.data.prepare.tokenizer import existing, train
from raptr.data.prepare.workfolder import alone, clear, naming, resume, reuse, work_folder
from raptr.data.store import (
    DTYPES,
    FORMAT,
    MANIFEST,
    TOKENIZER,
    DomainShards,
    Manifest,
    TokenStore,
    dtype_for,
    open_store,
)
from raptr.data.tokenizer import BERT, CONFIG, STOCK_KEYS, Specials, load, read_vocabulary
from raptr.files import made, sha256_of, sync, write_text

VOCABULARY = 30_000
# Part of the name of the built-in corpus's folder: increase it when its documents or their split change.
SPLIT = 2

Documents = Callable[[], Iterable[Document]]
Report = Callable[[Progress], None]
Say = Callable[[str], None]


def prepare_builtin(folder: Path, vocabulary: int, *, specials: Specials = BERT) -> TokenStore:
    """Return the built-in corpus from its folder under `folder`; prepare it if it is missing or damaged."""
    objective = "" if specials == BERT else f"-{specials.objective}"
    name = f"builtin-python{platform.python_version()}-split{SPLIT}-vocabulary{vocabulary}-format{FORMAT}{objective}"
    target = folder / name
    if target.exists():
        try:
            store = open_store(target)
            store.verify()
        except ValueError:
            # The folder is only our cache: if it is damaged, make it again.
            shutil.rmtree(target)
        else:
            return store
    train, valid = split(builtin())
    return prepare(target, lambda: train, vocabulary, valid=lambda: valid, specials=specials, domain="builtin")


def prepare(
    folder: Path,
    documents: Documents,
    vocabulary: int,
    *,
    valid: Documents | None = None,
    specials: Specials = BERT,
    domain: str = "text",
    shard_tokens: int = SHARD_TOKENS,
    progress: Report | None = None,
) -> TokenStore:
    """Write documents as a new folder of one domain; work that a crash interrupts is not continued.

    `documents` and `valid` are called more than once and must give the same documents in the same order; empty ones
    are left out. `valid` gives the held-out documents; without it, documents are held out by their hash. A shard holds
    whole documents: at most `shard_tokens` tokens, or a single longer document.
    """
    source = DomainSource(domain, ("documents",), 1.0)
    train, held_out = (tuple(DocumentsInput(call) for call in calls if call) for calls in ((documents,), (valid,)))
    inputs, valid_inputs = ((*train, *held_out),), (held_out,)
    request = Request((source,), inputs, vocabulary, valid=valid_inputs, shard_tokens=shard_tokens, specials=specials)
    if folder.exists():
        raise ValueError(f"{folder} exists. Give a new folder.")
    work = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}")
    with made(folder.parent):
        work.mkdir()
        try:
            _write(work, request, None, progress or _silent, _silent)
            try:
                work.rename(folder)
            except OSError:
                # Another process may have been faster. Its folder is as good if its content is the same.
                if not folder.exists() or open_store(folder).fingerprint != open_store(work).fingerprint:
                    raise
            sync(folder.parent)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return open_store(folder)


def prepare_corpus(
    domains: Sequence[DomainSource],
    out: Path,
    *,
    vocabulary: int = VOCABULARY,
    tokenizer: Path | None = None,
    specials: Specials = BERT,
    field: str = "text",
    documents: str | None = None,
    held_out: float = HELD_OUT,
    deduplicate: bool = False,
    skip_broken: bool = False,
    shard_tokens: int = SHARD_TOKENS,
    workers: int | None = None,
    progress: Report | None = None,
    say: Say | None = None,
) -> TokenStore:
    """Write the text of the domains as the folder `out`, with a new tokenizer or the given one (a file or its folder).

    `specials` are the special tokens of the objective that will be trained.

    `say` gets messages: what the documents are, and whether earlier work is reused, continued or discarded. `documents`
    says what counts as a document of a text file: see `DomainSource.inputs`. `deduplicate` drops all but the first of
    several documents with the same text, which takes 16 bytes of memory per document.
    """
    say = say or _silent
    check_out(domains, out)
    if tokenizer is not None and tokenizer.is_dir():
        tokenizer = tokenizer / TOKENIZER
    request = Request(
        domains=tuple(domains),
        inputs=tuple(domain.inputs(field, documents) for domain in domains),
        valid=tuple(domain.held_out(field, documents) for domain in domains),
        vocabulary=vocabulary,
        tokenizer=tokenizer,
        field=field,
        documents=documents,
        held_out=held_out,
        deduplicate=deduplicate,
        skip_broken=skip_broken,
        shard_tokens=shard_tokens,
        workers=workers,
        specials=specials,
    )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        return reuse(out, request.facts(), say)
    work = work_folder(out)
    with made(out.parent), alone(work), naming(work):
        try:
            journal = resume(work, request.facts(), say)
            if not (work / MANIFEST).exists():
                _write(work, request, journal, progress or _silent, say)
            _tidy(work)
            if out.exists():
                out.rmdir()  # it is empty; not every system can rename a folder onto another
            work.rename(out)
            sync(out.parent)
        finally:
            clear(work)
    return open_store(out)


def _write(work: Path, request: Request, journal: Journal | None, progress: Report, say: Say) -> None:
    """Complete the work folder from where the journal stands; only renaming it to its final name is left."""
    if journal is None:
        journal = _begin(work, request, progress, say)
    facts = read_vocabulary(work / TOKENIZER)
    dtype = dtype_for(facts.size)
    end = facts.name(request.specials.end)
    journal = encode(work, load(work / TOKENIZER), end, DTYPES[dtype], request, journal, progress)
    trained = [domain.total("train") for domain in journal.domains]
    weights = [source.weight or tokens / sum(trained) for source, tokens in zip(request.domains, trained, strict=True)]
    for i, (name, quota) in enumerate(zip(request.names, quotas(weights), strict=True)):
        # Without weights, each domain gets its share of the tokens, but at least one sample of a cycle.
        if quota == 0:
            say(f"domain {name} has {weights[i]:.2%} of the tokens; it gets the smallest weight that works, 1/{CYCLE}")
            weights[i] = 1 / CYCLE
    if not any(request.valid):
        _mention_short_held_out(journal.domains, request.held_out, say)
    manifest = Manifest(
        vocabulary=facts.size,
        dtype=dtype,
        tokenizer_sha256=sha256_of(work / TOKENIZER),
        domains=tuple(replace(domain, weight=weight) for domain, weight in zip(journal.domains, weights, strict=True)),
        request=journal.request,
        special_tokens=dict(request.special_tokens),
    )
    write_text(work / MANIFEST, manifest.to_json())
    _tidy(work)


def _begin(work: Path, request: Request, progress: Report, say: Say) -> Journal:
    """Read all documents once, train or copy the tokenizer, and write the first journal."""

    def read(chunk: Chunk, documents: int) -> None:
        progress(Progress("reading", chunk.read, request.total, documents))

    facts = request.facts()
    given = given_sides(request.domains, request.given_held_out()) if any(request.valid) else None
    sample = None if request.tokenizer else Sample()
    counts = take_census(request.domains, request.chunks(BEGINNING), sample, read, given)
    for name, count, inputs in zip(request.names, counts, request.inputs, strict=True):
        units = " or ".join(dict.fromkeys(one.unit for one in inputs))
        say(f"domain {name}: {count.documents:,} documents, one per {units}")
        if count.broken:
            say(f"domain {name}: {count.broken} broken, the first of them: {count.problem}")
    sides = given or sides_of(counts, request.limit)
    specials = request.specials
    if request.tokenizer:
        tokenizer, _ = existing(request.tokenizer, specials)
    else:
        assert sample is not None
        progress(Progress("training", request.total, request.total, sum(count.documents for count in counts)))
        tokenizer = train(sample.texts(sides), request.vocabulary, specials)
    write_text(work / TOKENIZER, tokenizer.to_str(pretty=True) + "\n")
    if names := request.special_tokens:
        stock = {STOCK_KEYS[token]: name for token, name in names.items()}
        write_text(work / CONFIG, json.dumps(stock, indent=2) + "\n")
    journal = Journal(
        request=facts,
        version=tokenizers.__version__,
        documents=tuple(count.documents for count in counts),
        held_out=tuple(sorted(sides.held_out)),
        trained=tuple(sorted(sides.trained)),
    )
    journal.write(work)
    return journal


def _mention_short_held_out(domains: Iterable[DomainShards], held_out: float, say: Say) -> None:
    """Say which domains hold out the requested fraction of documents, but less than a quarter of it in tokens."""
    for domain in domains:
        tokens = domain.total("valid") / (domain.total("train") + domain.total("valid"))
        if tokens < held_out / 4:
            count = domain.count("valid")
            say(
                f"domain {domain.name}: {count:,} of {domain.count('train') + count:,} documents are held out, but "
                f"with only {tokens:.2%} of the tokens. --held-out is a fraction of documents, {held_out:g}; raise it, "
                "or give text with --valid."
            )


def _tidy(work: Path) -> None:
    """Check that the folder is complete, and delete every file that is not part of the data."""
    shards = open_store(work).manifest.shards()
    names = {MANIFEST, TOKENIZER, CONFIG, *(name for shard in shards for name in (shard.file, shard.documents_file))}
    for path in work.iterdir():
        if path.name not in names:
            path.unlink()
    sync(work)


def _silent(_: object) -> None:
    """Ignore a message or a report of progress."""
