"""Random numbers as a pure function of counters (splitmix64), on any device.

A value depends on the seed and on what it is for (table, row, column; or sample and feature), never
on who asks or in which order. So every sharding of every pool starts from the same weights, and
every split of a batch sees the same samples, without anything being drawn centrally.
"""

from __future__ import annotations

import zlib

import torch

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def _signed(value: int) -> int:
    """An unsigned 64-bit constant as the int64 with the same bits."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def _shift_right(bits: torch.Tensor, count: int) -> torch.Tensor:
    """Logical shift (int64's own is arithmetic)."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _mix(bits: torch.Tensor) -> torch.Tensor:
    bits = (bits ^ _shift_right(bits, 30)) * _signed(_MIX_1)
    bits = (bits ^ _shift_right(bits, 27)) * _signed(_MIX_2)
    return bits ^ _shift_right(bits, 31)


def text_counter(text: str) -> int:
    """A counter that stands for a name, the same in every process."""
    return zlib.crc32(text.encode())


def hash64(*counters: int | torch.Tensor) -> torch.Tensor:
    """64 well-mixed bits per combination of counters.

    Args:
        counters: integers or int64 tensors; tensors broadcast against each other.

    Returns:
        int64 tensor of the broadcast shape.
    """
    device = next((c.device for c in counters if isinstance(c, torch.Tensor)), None)
    bits = torch.zeros((), dtype=torch.int64, device=device)
    for counter in counters:
        key = _signed(counter) if isinstance(counter, int) else counter
        bits = _mix(bits + _signed(_GOLDEN) + key)
    return bits


def uniform(*counters: int | torch.Tensor) -> torch.Tensor:
    """float64 in [0, 1), one per combination of counters (see ``hash64``)."""
    return _shift_right(hash64(*counters), 11).double() * 2.0**-53


def normal(*counters: int | torch.Tensor) -> torch.Tensor:
    """float64 standard normal, one per combination of counters (inverse CDF)."""
    # Half a step up: the CDF's inverse is infinite at 0.
    centred = 2.0 * (uniform(*counters) + 2.0**-54) - 1.0
    return torch.erfinv(centred) * 2.0**0.5
