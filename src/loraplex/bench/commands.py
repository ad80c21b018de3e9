"""`loraplex bench`: one command for each thing that is measured."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter

from loraplex.core.errors import CallerError, ErrorCode

bench_app = App(name="bench", help="Measurements beside the peers that are installed.")


@bench_app.command
def http(*, clients: int = 64, tokens: int = 2000, rounds: int = 3, json: Path | None = None) -> None:
    """Tokens and chunks per second of the server alone, beside a bare application on the same listener in the same run.

    Parameters
    ----------
    clients: streams at a time.
    tokens: chunks of each stream.
    rounds: measured rounds, after one that warms up.
    json: also write the rows to this file.
    """
    import msgspec

    from loraplex.bench.http import run_http

    rows = run_http(clients, tokens, rounds, print)
    for row in rows:
        print(
            f"{row.case:8} {row.tokens_a_second:9,.0f} tokens/s {row.chunks_a_second:9,.0f} chunks/s "
            f"{row.token_us:6.1f} us/token = {1e6 / row.token_us:9,.0f} tokens/s a core {row.rss_mib:5.0f} MiB"
        )
    if json is not None:
        json.write_bytes(msgspec.json.format(msgspec.json.encode(rows)) + b"\n")


@bench_app.command
def decode(
    model: Path | None = None,
    /,
    *,
    adapter: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    device: Literal["cpu", "cuda"] = "cpu",
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    peer: bool = True,
    repeats: int = 3,
    json: Path | None = None,
) -> None:
    """Tokens per second of base and adapters, beside transformers + PEFT in the same run.

    Parameters
    ----------
    model: folder; the demo model when left out.
    adapter: NAME=FOLDER, may be repeated.
    device: cpu or cuda.
    dtype: element type of weights, KV and factors.
    peer: also measure transformers + PEFT.
    repeats: timed runs of each row, after one warm-up.
    json: also write the rows to this file.
    """
    os.environ.setdefault(
        "OMP_WAIT_POLICY", "passive"
    )  # read when torch loads: spinning threads starve each other
    from loraplex.bench.decode import DecodeOptions, as_json, run_decode, table

    if repeats < 1:
        raise CallerError(
            ErrorCode.CONFIG_INVALID, f"repeats must be at least 1, got {repeats}", param="repeats"
        )
    if model is None:
        from loraplex.model.gguf import ensure_demo_model

        model = ensure_demo_model()
    options = DecodeOptions(
        model, tuple(_pair(text) for text in adapter), device=device, dtype=dtype, repeats=repeats, peer=peer
    )
    rows = run_decode(options, print)
    head = ("case", "loraplex tok/s", "transformers+PEFT", "ratio", "of our base")
    lines = [head, *table(rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)))
    if json is not None:
        json.write_text(as_json(options, rows) + "\n", encoding="utf-8")


@bench_app.command
def identity(
    *,
    mib: int = 80,
    registrations: int = 1000,
    names: int = 10_000,
    repeats: int = 5,
    json: Path | None = None,
) -> None:
    """Verify, hash and host-load an adapter beside sha256sum; publish many; look names up.

    Parameters
    ----------
    mib: size of the adapter.
    registrations: revisions published one after the other.
    names: adapters among which names are looked up.
    repeats: timed runs of each load, after one that fills caches.
    json: also write the rows to this file.
    """
    from loraplex.bench.identity import IdentityOptions, as_json, run_identity

    if min(mib, registrations, names, repeats) < 1:
        raise CallerError(ErrorCode.CONFIG_INVALID, "every number must be at least 1")
    options = IdentityOptions(mib, registrations, names, repeats)
    rows = run_identity(options, print)
    width = max(len(row.case) for row in rows)
    for row in rows:
        ratio = (
            "" if row.ratio is None else f"  {row.cpu:>9,.0f} per CPU second, {row.ratio:.2f} of sha256sum's"
        )
        print(f"{row.case.ljust(width)}  {row.value:>12,.1f} {row.unit}{ratio}")
    if json is not None:
        json.write_text(as_json(options, rows) + "\n", encoding="utf-8")


def _pair(text: str) -> tuple[str, Path]:
    name, equals, folder = text.partition("=")
    if not name or not equals or not Path(folder).is_dir():
        raise CallerError(
            ErrorCode.CONFIG_INVALID,
            f"--adapter takes NAME=FOLDER with an existing folder, got {text!r}",
            param="adapter",
        )
    return name, Path(folder)
