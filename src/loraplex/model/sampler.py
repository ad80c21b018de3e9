"""Chooses tokens on the device: bias, penalties, temperature, truncation, and Gumbel noise keyed by (seed;
position, id).

Owns sampling state per request slot (parameters, bias, token counts). Never decides who samples: the plan's
sample rows do. What a row draws depends on its own logits, parameters and position alone, in any batch and on
any device.

Order of operations: logit bias; repetition penalty (prompt and output); frequency and presence (output);
temperature; min_p; top_k; top_p; draw. Greedy takes the highest logit after the penalties, ties to the lowest
id. Only rows that ask for a feature pay for it. Specification: 0x03E; rulings "Sampling".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.core.packed import I32, bits_float
from loraplex.core.plan import BiasColumns, OpenColumns
from loraplex.model.penalties import TokenCounts
from loraplex.model.philox import token_noise, vocabulary_noise
from loraplex.model.sampler_cpu import OPTIONS, CompiledSampling
from loraplex.model.transfer import to_device
from loraplex.model.truncate import candidates

I64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

_FLOATS = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")
_LOGPROB_ROWS = 64
"""Rows of log probabilities computed at a time: bounds the temporaries to a few of [64, V]."""


_Draw = Callable[[torch.Tensor, I64, I64, I64], torch.Tensor]
"""(logits, rows of logits, request slots, positions) -> tokens."""


class Draws(Protocol):
    """One function that draws rows with any options: compiled on a CPU, a kernel on a device."""

    def draw(
        self, logits: torch.Tensor, index: I64, vocab: int, options: npt.NDArray[np.void]
    ) -> torch.Tensor:
        """Tokens int64 [n] from rows `index` [n] of logits, over the first `vocab` columns. options:
        `OPTIONS` [n].
        """
        ...


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Which tokens some samples may be. samples: int32 [M]. words: int32 [M, ceil(V / 32)], a bit for each
    token.
    """

    samples: I32
    words: I32

    def forbidden(self, vocab: int, device: torch.device) -> torch.Tensor:
        """Bool [M, vocab] on the device: where a token must not be drawn. Only the bits travel there."""
        octets = to_device(self.words.astype("<i4").view(np.uint8), device)
        bits = (octets.unsqueeze(2) >> torch.arange(8, dtype=torch.uint8, device=device)) & 1
        return bits.flatten(1)[:, :vocab] == 0

    def of(self, samples: I64) -> TokenMasks | None:
        """The masks of some samples, which are then counted from 0; None where they have none.
        samples: ascending.
        """
        kept = np.isin(self.samples, samples)
        if not kept.any():
            return None
        places = np.searchsorted(samples, self.samples[kept]).astype(np.int32)
        return TokenMasks(places, self.words[kept])


@dataclass(frozen=True, slots=True)
class _Bias:
    ids: torch.Tensor
    values: torch.Tensor


class Sampler:
    """Sampling for request slots 0 to max_requests - 1. Ids from `sampled_vocab` on are never drawn, but by a
    slot that opens for others (`sampled_ids`): it has the whole vocabulary before it, and no chance for the
    rest, so that two widths are all that kernels are compiled for.

    vocab_size: V, columns of the logits. compiled: use the compiled functions where the device has them; they
    give the same tokens as the torch code here, up to scores that tie within float32 rounding. Raises
    `plan_malformed` for arrays that contradict each other.
    """

    def __init__(
        self,
        max_requests: int,
        vocab_size: int,
        sampled_vocab: int,
        device: torch.device,
        *,
        compiled: bool = True,
    ) -> None:
        if not 0 < sampled_vocab <= vocab_size:
            raise InternalFault(
                ErrorCode.PLAN_MALFORMED,
                f"{sampled_vocab} sampled ids do not fit a vocabulary of {vocab_size}",
            )
        self._vocab = vocab_size
        self._sampled = sampled_vocab
        self._reach = np.full(max_requests, sampled_vocab, dtype=np.int64)
        self._device = device
        self._values = {name: np.zeros(max_requests, dtype=np.float32) for name in _FLOATS}
        self._top_k = np.zeros(max_requests, dtype=np.int64)
        self._seeds = np.zeros((max_requests, 2), dtype=np.int64)
        self._bias: dict[int, _Bias] = {}
        self._has_bias = np.zeros(max_requests, dtype=np.bool_)
        self._penalised = np.zeros(max_requests, dtype=np.bool_)
        self._truncated = np.zeros(max_requests, dtype=np.bool_)
        self._compiled = CompiledSampling.find(device) if compiled else None
        self._draws: Draws | None = self._compiled if compiled else None
        if device.type == "cuda":
            from loraplex.model.cuda.draws import DeviceDraws  # needs Triton

            self._draws = DeviceDraws(device)
        self.counts = TokenCounts(max_requests, vocab_size, device, self._compiled)

    @property
    def sampled(self) -> int:
        """Ids below this may be drawn."""
        return self._sampled

    def open(self, opens: OpenColumns, open_bias: BiasColumns, open_history: I32) -> None:
        """Start request slots over, from the plan's sections of these names."""
        if not len(opens):
            return
        slots = opens.slot
        bias_ends = np.cumsum(opens.bias)
        history_ends = np.cumsum(opens.history)
        if slots.min() < 0 or slots.max() >= self._top_k.size:
            raise InternalFault(
                ErrorCode.PLAN_MALFORMED, f"request slots run to {self._top_k.size - 1}, got {slots.tolist()}"
            )
        if bias_ends[-1] != len(open_bias) or history_ends[-1] != open_history.size:
            raise InternalFault(
                ErrorCode.PLAN_MALFORMED,
                f"opens name {int(bias_ends[-1])} biases and {int(history_ends[-1])} tokens of history, the "
                "plan has "
                f"{len(open_bias)} and {open_history.size}",
            )
        reach = np.where(opens.sampled_ids == 0, self._sampled, opens.sampled_ids)
        if reach.min() < 0 or reach.max() > self._vocab:
            raise InternalFault(
                ErrorCode.PLAN_MALFORMED,
                f"request slots open for {opens.sampled_ids.tolist()} ids, the vocabulary has {self._vocab}",
            )
        self._reach[slots] = reach
        values = self._values
        values["temperature"][slots] = bits_float(opens.temperature)
        values["top_p"][slots] = bits_float(opens.top_p)
        values["min_p"][slots] = bits_float(opens.min_p)
        values["repetition"][slots] = bits_float(opens.repetition)
        values["presence"][slots] = bits_float(opens.presence)
        values["frequency"][slots] = bits_float(opens.frequency)
        self._top_k[slots] = opens.top_k
        self._seeds[slots, 0] = opens.seed_low
        self._seeds[slots, 1] = opens.seed_high
        self._penalised[slots] = (
            (values["repetition"] != 1.0) | (values["presence"] != 0.0) | (values["frequency"] != 0.0)
        )[slots]
        self._truncated[slots] = ((values["min_p"] > 0.0) | (values["top_p"] < 1.0) | (self._top_k > 0))[
            slots
        ]
        for row, slot in enumerate(slots.tolist()):
            count = int(opens.bias[row])
            self._set_bias(slot, open_bias[bias_ends[row] - count : bias_ends[row]])
            if self._penalised[slot]:
                length = int(opens.history[row])
                history = open_history[history_ends[row] - length : history_ends[row]]
                self.counts.open(slot, history, int(opens.prompt_tokens[row]))
            else:
                self.counts.close(slot)

    def takes_best(self, slots: I32) -> bool:
        """Whether every one of these request slots takes the highest raw logit below `sampled_vocab`."""
        return not (
            (self._values["temperature"][slots] != 0.0)
            | self._penalised[slots]
            | self._has_bias[slots]
            | (self._reach[slots] != self._sampled)
        ).any()

    def sample(
        self,
        logits: torch.Tensor,
        logit_index: I32,
        slots: I32,
        positions: I32,
        masks: TokenMasks | None = None,
    ) -> torch.Tensor:
        """One token for each sample, int64 [S] on the device; counts move on.

        logits: float32 [L, V], never changed. logit_index, slots, positions: int32 [S] on the host: row of
        logits, request slot, position of the token that is drawn. masks: applied last, so that no bias or
        penalty lets a forbidden token through.
        """
        if logits.dtype is not torch.float32 or logits.dim() != 2 or logits.shape[1] != self._vocab:
            raise InternalFault(
                ErrorCode.PLAN_MALFORMED,
                f"logits must be float32 [rows, {self._vocab}], got {logits.dtype} {tuple(logits.shape)}",
            )
        own, index = slots.astype(np.int64), logit_index.astype(np.int64)
        wide = self._reach[own] != self._sampled
        if not wide.any():
            return self._choose(logits[:, : self._sampled], index, own, positions, masks)
        tokens = torch.empty(own.size, dtype=torch.int64, device=self._device)
        for rows, width in ((~wide, self._sampled), (wide, self._vocab)):
            part = np.flatnonzero(rows)
            if part.size:
                tokens[self._ids(part)] = self._choose(
                    logits[:, :width],
                    index[part],
                    own[part],
                    positions[part],
                    None if masks is None else masks.of(part),
                )
        return tokens

    def _choose(
        self,
        logits: torch.Tensor,
        index: I64,
        own: I64,
        positions: I32,
        masks: TokenMasks | None,
    ) -> torch.Tensor:
        """`sample` for slots that draw from the same columns, which are all that `logits` has."""
        greedy = self._values["temperature"][own] == 0.0
        adjusted = self._penalised[own] | self._has_bias[own] | (self._reach[own] < logits.shape[1])
        if masks is not None:
            adjusted[masks.samples] = True
        if greedy.all() and not adjusted.any() and _is_identity(index, logits.shape[0]):
            return torch.argmax(logits, dim=1)
        if adjusted.any():
            logits = logits.index_select(0, self._ids(index))
            index = np.arange(own.size, dtype=np.int64)
            self._adjust(logits, own)
            if masks is not None:
                self._forbid(logits, masks)
        tokens = torch.empty(own.size, dtype=torch.int64, device=self._device)
        for rows, draw in self._routes(greedy, own):
            if rows.any():
                target = self._ids(np.flatnonzero(rows))
                tokens[target] = draw(logits, index[rows], own[rows], positions[rows].astype(np.int64))
        counted = self._penalised[own]
        if counted.any():
            self.counts.add(own[counted], tokens[self._ids(np.flatnonzero(counted))])
        return tokens

    def top_logprobs(
        self, logits: torch.Tensor, logit_index: I32, slots: I32, chosen: torch.Tensor, top: I32
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log probabilities of raw logits (of any floating type): ids int64 and values float32, both [n, 1 +
        max(top)].

        chosen: int64 [n] on the device, first in each row; then the `top[i]` best ids that the request slot
        may draw, ties to the lowest id. Entries of row i after 1 + top[i] mean nothing. slots, top: int32 [n]
        on the host, each >= 0.
        """
        width = min(int(top.max(initial=0)), self._sampled)
        ids = torch.empty((logit_index.size, 1 + width), dtype=torch.int64, device=self._device)
        values = torch.empty((logit_index.size, 1 + width), dtype=torch.float32, device=self._device)
        index = self._ids(logit_index)
        for lo in range(0, logit_index.size, _LOGPROB_ROWS):
            part = slice(lo, lo + _LOGPROB_ROWS)
            rows = logits.index_select(0, index[part]).float()
            ids[part, 0] = chosen[part]
            if width:
                drawn = self._drawn_from(rows, slots[part].astype(np.int64))
                ids[part, 1:] = self._best(drawn, width)
            total = torch.logsumexp(rows, dim=1, keepdim=True)
            values[part] = rows.gather(1, ids[part]) - total
        return ids, values

    def ranks(self, logits: torch.Tensor, logit_index: I32, chosen: torch.Tensor) -> torch.Tensor:
        """How many ids below `sampled_vocab` come up to each chosen one, itself included, ties to the
        lowest id: int64 [n]. As in `top_logprobs`.
        """
        ranks = torch.empty(logit_index.size, dtype=torch.int64, device=self._device)
        index = self._ids(logit_index)
        columns = torch.arange(self._sampled, device=self._device)
        for lo in range(0, logit_index.size, _LOGPROB_ROWS):
            part = slice(lo, lo + _LOGPROB_ROWS)
            rows, own = logits.index_select(0, index[part]), chosen[part].unsqueeze(1)
            values, seen = rows.gather(1, own), rows[:, : self._sampled]
            ranks[part] = ((seen > values) | ((seen == values) & (columns < own))).sum(dim=1) + 1
        return ranks

    def _drawn_from(self, rows: torch.Tensor, slots: I64) -> torch.Tensor:
        """The columns of rows that their slots may draw; what only others may has no chance."""
        reach = self._reach[slots]
        if (reach == self._sampled).all():
            return rows[:, : self._sampled]
        rows = rows.clone()
        self._cut(rows, reach)
        return rows

    def _best(self, rows: torch.Tensor, width: int) -> torch.Tensor:
        if self._compiled is not None:
            return self._compiled.best(rows, rows.shape[1], width)
        return best_ids(rows, width)

    def _cut(self, work: torch.Tensor, reach: I64) -> None:
        """No chance for the ids of a row from its reach on, in place."""
        for row in np.flatnonzero(reach < work.shape[1]).tolist():
            work[row, int(reach[row]) :] = -torch.inf

    def _set_bias(self, slot: int, entries: BiasColumns) -> None:
        self._has_bias[slot] = len(entries) > 0
        self._bias.pop(slot, None)
        if len(entries) == 0:
            return
        ids = entries.token
        if ids.min() < 0 or ids.max() >= self._vocab:
            raise InternalFault(
                ErrorCode.PLAN_MALFORMED,
                f"a logit bias of request slot {slot} leaves the vocabulary of {self._vocab} tokens",
            )
        inside = ids < self._reach[slot]
        values = to_device(bits_float(entries.bias)[inside], self._device)
        self._bias[slot] = _Bias(self._ids(ids[inside]), values)

    def _adjust(self, work: torch.Tensor, slots: I64) -> None:
        """Bias, then penalties, then what a slot may not draw, in place."""
        for row in np.flatnonzero(self._has_bias[slots]).tolist():
            bias = self._bias[int(slots[row])]
            work[row].index_add_(0, bias.ids, bias.values)
        rows = np.flatnonzero(self._penalised[slots])
        if rows.size:
            own = slots[rows]
            penalties = np.stack(
                [self._values[n][own] for n in ("repetition", "presence", "frequency")], axis=1
            )
            self.counts.penalise(work, rows, own, penalties)
        self._cut(work, self._reach[slots])

    def _forbid(self, work: torch.Tensor, masks: TokenMasks) -> None:
        """What a mask leaves out has no chance, in place."""
        forbidden = masks.forbidden(work.shape[1], self._device)
        rows = self._ids(masks.samples)
        work[rows] = work.index_select(0, rows).masked_fill_(forbidden, -torch.inf)

    def _routes(self, greedy: Bools, slots: I64) -> tuple[tuple[Bools, _Draw], ...]:
        """Which rows are drawn how."""
        if self._draws is not None:
            return (greedy, self._greedy), (~greedy, self._draw_together)
        truncated = self._truncated[slots]
        return (
            (greedy, self._greedy),
            (~greedy & ~truncated, self._draw_full),
            (~greedy & truncated, self._draw_truncated),
        )

    def _greedy(self, logits: torch.Tensor, index: I64, slots: I64, positions: I64) -> torch.Tensor:
        return torch.argmax(self._rows(logits, index), dim=1)

    def _draw_full(self, logits: torch.Tensor, index: I64, slots: I64, positions: I64) -> torch.Tensor:
        noise = vocabulary_noise(self._seed_rows(slots), self._ids(positions), logits.shape[1])
        return torch.argmax(noise.add_(self._scaled(self._rows(logits, index), slots)), dim=1)

    def _draw_truncated(self, logits: torch.Tensor, index: I64, slots: I64, positions: I64) -> torch.Tensor:
        values, ids = candidates(
            self._scaled(self._rows(logits, index), slots),
            self._column("min_p", slots),
            self._ids(self._top_k[slots]).unsqueeze(1),
            self._column("top_p", slots),
        )
        noise = token_noise(self._seed_rows(slots), self._ids(positions), ids)
        best = torch.argmax(values + noise, dim=1, keepdim=True)
        return ids.gather(1, best).squeeze(1)

    def _draw_together(self, logits: torch.Tensor, index: I64, slots: I64, positions: I64) -> torch.Tensor:
        if self._draws is None:
            raise InternalFault(ErrorCode.INTERNAL, "one function was to draw all rows and there is none")
        options = np.empty(slots.size, dtype=OPTIONS)
        for name in ("temperature", "min_p", "top_p"):
            options[name] = self._values[name][slots]
        options["top_k"] = self._top_k[slots]
        options["seed_low"], options["seed_high"] = self._seeds[slots].T
        options["position"] = positions
        return self._draws.draw(logits, np.ascontiguousarray(index), logits.shape[1], options)

    def _rows(self, logits: torch.Tensor, index: I64) -> torch.Tensor:
        return logits.index_select(0, self._ids(index))

    def _scaled(self, work: torch.Tensor, slots: I64) -> torch.Tensor:
        """Logits over temperature with the maximum at 0, so that a tiny temperature cannot overflow."""
        return (work - work.amax(dim=1, keepdim=True)).div_(self._column("temperature", slots))

    def _column(self, name: str, slots: I64) -> torch.Tensor:
        return to_device(self._values[name][slots], self._device).unsqueeze(1)

    def _seed_rows(self, slots: I64) -> torch.Tensor:
        return to_device(self._seeds[slots], self._device)

    def _ids(self, values: npt.NDArray[np.signedinteger]) -> torch.Tensor:
        return to_device(values.astype(np.int64), self._device)


def best_ids(logits: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` best columns of each row, best first, ties to the lowest id. float32 [n, V] -> int64 [n,
    count].
    """
    vocab = logits.shape[1]
    # Order-preserving integers: adding 0.0 turns -0.0 into 0.0; the low half makes equal logits differ by id.
    bits = (logits + 0.0).view(torch.int32).to(torch.int64)
    ordered = torch.where(bits >= 0, bits, -(bits & 0x7FFF_FFFF))
    reverse = torch.arange(vocab - 1, -1, -1, dtype=torch.int64, device=logits.device)
    keys = (ordered << 32) + reverse
    best = torch.topk(keys, count, dim=1).values
    return vocab - 1 - (best & 0xFFFF_FFFF)


def _is_identity(index: I64, rows: int) -> bool:
    return index.size == rows and bool((index == np.arange(rows)).all())
