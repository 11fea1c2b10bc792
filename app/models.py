"""What REST calls take and give: strict types, and no field that is not known."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator

MAX_TOKENS = 1 << 20
"""Tokens that one call may name."""

MAX_HASHES = 1 << 17
"""Block hashes that one call may name."""

# The first bad item is enough: a million of them would make an answer larger than the question.
Tokens = Annotated[
    list[Annotated[int, Field(ge=0, lt=1 << 32)]],
    Field(max_length=MAX_TOKENS, fail_fast=True, description="Token ids of the prompt, from its first on."),
]
Hashes = Annotated[
    list[Annotated[str, Field(pattern=r"^([0-9a-fA-F]{2}){8,64}$")]],
    Field(
        max_length=MAX_HASHES,
        fail_fast=True,
        description="The engine's own block hashes instead of tokens, in hex, 8 to 64 bytes each.",
    ),
]


class Model(BaseModel):
    """The base of them all. Inputs stay out of error texts: they may be tokens or salts."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, hide_input_in_errors=True)


class Flaw(Model):
    """One thing that is wrong with a request."""

    location: str = Field(description="Where, as path: body.tokens.3")
    message: str
    kind: str = Field(description="A stable word for programs: missing, extra_forbidden, int_type, ...")


class ComponentState(Model):
    """A part of the cache and how it is."""

    name: str
    state: Literal["ok", "degraded", "failed"]
    since: float = Field(description="Seconds since the epoch.")
    cause: str | None = Field(description="Why it is not ok.")


class Problem(Model):
    """Every error, after RFC 9457."""

    type: str = Field(description="about:blank for plain HTTP errors, else a urn:kvtide:problem:... name.")
    title: str
    status: int = Field(ge=400, lt=600)
    detail: str
    instance: str | None = Field(default=None, description="Names this occurrence in the service's log.")
    errors: list[Flaw] | None = Field(default=None, description="What is wrong with the request.")
    components: list[ComponentState] | None = Field(default=None, description="Of /readyz: every component.")


class Alive(Model):
    """The loop turns."""

    status: Literal["alive"] = "alive"


class Ready(Model):
    """Requests are served; a degraded component serves less than it was asked to."""

    status: Literal["ready", "degraded"]
    components: list[ComponentState]


class MatchRequest(Model):
    """Which prompt to look up: its tokens, or the block hashes that an engine already has."""

    namespace: Annotated[str, Field(min_length=1, max_length=1024, description="The id given to attach.")]
    tokens: Tokens | None = None
    hashes: Hashes | None = None
    salt: Annotated[SecretStr, Field(max_length=1024)] | None = Field(
        default=None, description="The tenant's secret. Without it nothing stored under it is found."
    )
    extra: Annotated[str, Field(max_length=8192, pattern=r"^([0-9a-fA-F]{2})*$")] = Field(
        default="", description="What tokens don't show, in hex: a LoRA id, the hash of an image."
    )

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.tokens is None) == (self.hashes is None):
            raise ValueError("give either tokens or hashes")
        if self.hashes is not None and self.extra:
            raise ValueError("extra goes with tokens: ready-made hashes already cover it")
        return self


class MatchAnswer(Model):
    """How much of a prompt is held. Nothing is pinned: it may be gone a moment later."""

    tokens: int = Field(description="Length of the longest prefix held.")
    by_tier: dict[str, int] = Field(description="The same tokens, by the tier that they would come from.")
