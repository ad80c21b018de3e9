"""The generator against its published test vectors, and the noise made from it."""

from __future__ import annotations

import math

import pytest
import torch

from loraplex.model.philox import gumbel, philox4x32, token_noise, vocabulary_noise

# The known answers that the generator's authors publish with Random123 (kat_vectors, philox4x32 10).
VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def words(*values: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor([v], dtype=torch.int64) for v in values)


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]) -> None:
    c0, c1, c2, c3 = words(*counter)
    k0, k1 = words(*key)
    assert tuple(int(w) for w in philox4x32((c0, c1, c2, c3), (k0, k1))) == expected


def test_noise_of_chosen_ids_is_the_noise_of_the_vocabulary() -> None:
    seeds = torch.tensor([[1, 2], [-1, 7], [1, 2]])
    positions = torch.tensor([5, 5, 6])
    full = vocabulary_noise(seeds, positions, 101)
    ids = torch.tensor([[0, 3, 100, 50], [99, 1, 2, 3], [100, 0, 4, 5]])
    assert torch.equal(token_noise(seeds, positions, ids), full.gather(1, ids))
    assert not torch.equal(full[0], full[1])
    assert not torch.equal(full[0], full[2])


def test_noise_of_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    seeds, positions = torch.tensor([[3, 4], [5, 6]]), torch.tensor([1, 2])
    both = vocabulary_noise(seeds, positions, 64)
    assert torch.equal(both[1:], vocabulary_noise(seeds[1:], positions[1:], 64))
    assert torch.equal(both[:, :30], vocabulary_noise(seeds, positions, 30))


def test_gumbel_is_finite_at_both_ends_and_keeps_the_winning_tail() -> None:
    ends = gumbel(torch.tensor([0, 1, 0xFFFF_FFFF]))
    assert torch.isfinite(ends).all()
    assert ends[0].item() == pytest.approx(-math.log(0.5 * 2.0**-32), rel=1e-6)
    assert ends[0] > ends[1] > ends[2]


def test_gumbel_moments() -> None:
    noise = vocabulary_noise(torch.tensor([[11, 0]]), torch.tensor([0]), 200_000).double()
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.01)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.03)
