"""Settings are validated once, and say what to change."""

import dataclasses
from typing import Any

import pytest

from kvtide.core.errors import InvalidRequest
from kvtide.core.settings import GIB, MIB, PAGE, Settings


def test_defaults_are_valid() -> None:
    made = Settings()
    assert made.extent_bytes == 16 * MIB
    assert made.host_bytes == 4 * GIB
    assert dict(made.quotas) == {}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"extent_bytes": 0}, "extent_bytes"),
        ({"extent_bytes": PAGE + 1}, "extent_bytes"),
        ({"extent_bytes": -PAGE}, "extent_bytes"),
        ({"host_bytes": 16 * MIB - 1}, "raise host_bytes or lower extent_bytes"),
        ({"host_bytes": 4.0 * GIB}, "whole number"),
        ({"block_tokens": 0}, "block_tokens"),
        ({"block_tokens": 16.5}, "whole number"),
        ({"block_tokens": True}, "whole number"),
        ({"block_tokens": "16"}, "whole number"),
        ({"max_inflight_bytes": 0}, "max_inflight_bytes"),
        ({"max_queued": 0}, "max_queued"),
        ({"deadline": 0}, "deadline"),
        ({"deadline": -1.0}, "deadline"),
        ({"deadline": float("inf")}, "deadline"),
        ({"deadline": float("nan")}, "deadline"),
        ({"policy": "fifo"}, "policy"),
        ({"on_full": "evict"}, "on_full"),
        ({"quotas": {"m": 0}}, "quota"),
    ],
)
def test_what_makes_no_sense(change: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidRequest, match=told):
        Settings(**change)


def test_they_are_frozen_and_so_is_what_they_were_given() -> None:
    quotas = {"m": 1}
    made = Settings(quotas=quotas)
    quotas["m"] = -5
    assert made.quotas["m"] == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.deadline = 1.0  # type: ignore[misc]
    with pytest.raises(TypeError):
        made.quotas["m"] = 2  # type: ignore[index]


def test_a_changed_copy_is_validated_as_well() -> None:
    assert dataclasses.replace(Settings(), deadline=1.0).deadline == 1.0
    with pytest.raises(InvalidRequest):
        dataclasses.replace(Settings(), deadline=0.0)
