"""The adapter on tiny random models: the same tokens with and without the cache, or a clear refusal."""

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

import kvtide
from kvtide.app.transformers import PrefixCache, prompt_tokens
from kvtide.app.transformers_layers import model_namespace

pytestmark = pytest.mark.blocks_loop("the models compute on the test's own thread")

BLOCK = 16
VOCABULARY = 97
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    # Sharp attention and lively answers: with less, wrong KV would not show in the tokens.
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def make_model(config: Any = None, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(config or LlamaConfig(**SIZES)).eval()


def prompt(length: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def greedy(model: Any, ids: torch.Tensor, past: Any, new: int = 8) -> list[int]:
    """Compute `ids` behind `past`, and decode."""
    answer = []
    for _ in range(new):
        ids = model(input_ids=ids, past_key_values=past).logits[:, -1].argmax(-1, keepdim=True)
        answer.append(int(ids))
    return answer


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return make_model()


@pytest.fixture
async def cache() -> AsyncIterator[kvtide.Cache]:
    settings = kvtide.Settings(host_bytes=32 << 20, extent_bytes=1 << 20, block_tokens=BLOCK)
    async with kvtide.open_cache(settings) as opened:
        yield opened


@pytest.fixture
def prefixes(cache: kvtide.Cache, model: LlamaForCausalLM) -> PrefixCache:
    return PrefixCache(cache, model, weights="seed-0")


class TestIdentity:
    @pytest.mark.parametrize(
        ("length", "reused"), [(1, 0), (15, 0), (16, 0), (17, 16), (32, 16), (33, 32), (100, 96)]
    )
    async def test_same_tokens_for_every_length(
        self, prefixes: PrefixCache, model: Any, length: int, reused: int
    ) -> None:
        ids = prompt(length)
        cold_past = DynamicCache(config=model.config)
        cold = greedy(model, ids, cold_past)

        missed = await prefixes.load(ids)
        assert (missed.tokens, missed.past_key_values.get_seq_length()) == (0, 0)
        assert greedy(model, ids, missed.past_key_values) == cold
        await prefixes.store(ids, missed.past_key_values)

        prefix = await prefixes.load(ids)
        assert prefix.tokens == reused == prefix.past_key_values.get_seq_length()
        assert sum(prefix.by_tier.values()) == reused
        assert greedy(model, ids[:, reused:], prefix.past_key_values) == cold

    async def test_loaded_bytes_are_the_stored_bytes(self, prefixes: PrefixCache, model: Any) -> None:
        ids = prompt(70)
        past = DynamicCache(config=model.config)
        greedy(model, ids, past)
        await prefixes.store(ids, past)
        prefix = await prefixes.load(ids)
        assert prefix.tokens == 64
        for loaded, stored in zip(prefix.past_key_values.layers, past.layers, strict=True):
            assert torch.equal(loaded.keys, stored.keys[:, :, :64])
            assert torch.equal(loaded.values, stored.values[:, :, :64])

    async def test_wrong_kv_would_show(self, prefixes: PrefixCache, model: Any) -> None:
        ids = prompt(100)
        past = DynamicCache(config=model.config)
        cold = greedy(model, ids, past)
        await prefixes.store(ids, past)
        prefix = await prefixes.load(ids)
        prefix.past_key_values.layers[0].values[:, :, 32:48] = 0
        assert greedy(model, ids[:, prefix.tokens :], prefix.past_key_values) != cold

    @pytest.mark.parametrize(
        "config",
        [
            transformers.Qwen2Config(**SIZES, use_sliding_window=False),
            # Positions that are counted, not rotated.
            transformers.GPT2Config(
                vocab_size=VOCABULARY, n_positions=512, n_embd=64, n_layer=2, n_head=4, initializer_range=0.3
            ),
            # Keys and values of different sizes.
            transformers.DeepseekV2Config(
                **{**SIZES, "num_key_value_heads": 4},
                kv_lora_rank=16,
                q_lora_rank=None,
                qk_nope_head_dim=16,
                qk_rope_head_dim=8,
                v_head_dim=16,
                first_k_dense_replace=2,
            ),
        ],
        ids=lambda config: config.model_type,
    )
    async def test_other_models(self, cache: kvtide.Cache, config: Any) -> None:
        model = make_model(config)
        prefixes = PrefixCache(cache, model, weights="seed-0")
        ids = prompt(50)
        past = DynamicCache(config=model.config)
        cold = greedy(model, ids, past)
        await prefixes.store(ids, past)
        prefix = await prefixes.load(ids)
        assert prefix.tokens == 48
        assert greedy(model, ids[:, 48:], prefix.past_key_values) == cold

    async def test_prefix_of_another_prompt(self, prefixes: PrefixCache, model: Any) -> None:
        first = prompt(80)
        past = DynamicCache(config=model.config)
        greedy(model, first, past)
        await prefixes.store(first, past)
        second = torch.cat([first[:, :40], prompt(30, seed=2)], dim=1)
        prefix = await prefixes.load(second)
        assert prefix.tokens == 32
        cold = greedy(model, second, DynamicCache(config=model.config))
        assert greedy(model, second[:, 32:], prefix.past_key_values) == cold


class TestGenerate:
    async def test_generate_continues_on_a_loaded_prefix(self, prefixes: PrefixCache, model: Any) -> None:
        ids = prompt(60)
        options = {"max_new_tokens": 8, "do_sample": False}
        plain = model.generate(ids, **options)
        past = DynamicCache(config=model.config)
        model.generate(ids, past_key_values=past, **options)
        await prefixes.store(ids, past)
        prefix = await prefixes.load(ids)
        assert prefix.tokens == 48
        again = model.generate(ids, past_key_values=prefix.past_key_values, **options)
        assert torch.equal(again, plain)

    async def test_what_was_generated_is_found_again(self, prefixes: PrefixCache, model: Any) -> None:
        ids = prompt(60)
        plain = model.generate(ids, max_new_tokens=24, do_sample=False)
        first = await prefixes.generate(ids, max_new_tokens=24, do_sample=False)
        second = await prefixes.generate(ids, max_new_tokens=24, do_sample=False)
        assert torch.equal(first, plain)
        assert torch.equal(second, plain)
        # The 84th token was chosen and never computed on: 83 are held, 80 in full blocks.
        assert (await prefixes.load(torch.cat([first, prompt(9)], dim=1))).tokens == 80


class TestStore:
    async def test_counts_and_start(self, prefixes: PrefixCache, model: Any) -> None:
        ids = prompt(100)
        past = DynamicCache(config=model.config)
        greedy(model, ids[:, :70], past, new=1)
        assert (await prefixes.store(ids[:, :70], past)).stored == 4
        greedy(model, ids[:, 70:], past, new=1)
        assert (await prefixes.store(ids, past, start=64)).stored == 2
        assert (await prefixes.store(ids, past)).already == 6
        assert (await prefixes.load(ids)).tokens == 96

    async def test_tokens_that_the_cache_does_not_hold_are_not_stored(
        self, prefixes: PrefixCache, model: Any
    ) -> None:
        past = DynamicCache(config=model.config)
        greedy(model, prompt(40), past, new=1)
        assert (await prefixes.store(torch.cat([prompt(40), prompt(60)], dim=1), past)).stored == 2

    async def test_nothing_to_store(self, prefixes: PrefixCache, model: Any) -> None:
        past = DynamicCache(config=model.config)
        greedy(model, prompt(15), past, new=1)
        assert await prefixes.store(prompt(15), past) == kvtide.Stored(stored=0, already=0, dropped=0)

    @pytest.mark.parametrize("start", [-16, 8, 64])
    async def test_start_must_be_a_block_of_the_prompt(
        self, prefixes: PrefixCache, model: Any, start: int
    ) -> None:
        past = DynamicCache(config=model.config)
        greedy(model, prompt(40), past, new=1)
        with pytest.raises(kvtide.InvalidRequest, match="start"):
            await prefixes.store(prompt(40), past, start=start)

    async def test_a_cache_of_another_model(self, prefixes: PrefixCache) -> None:
        other = make_model(LlamaConfig(**{**SIZES, "num_hidden_layers": 3}))
        past = DynamicCache(config=other.config)
        greedy(other, prompt(40), past, new=1)
        with pytest.raises(kvtide.InvalidRequest, match="3 layers"):
            await prefixes.store(prompt(40), past)

    async def test_a_batch(self, prefixes: PrefixCache, model: Any) -> None:
        past = DynamicCache(config=model.config)
        with torch.no_grad():
            model(input_ids=prompt(40).expand(2, -1), past_key_values=past)
        with pytest.raises(kvtide.InvalidRequest, match="batch of 2"):
            await prefixes.store(prompt(40), past)

    async def test_layers_must_be_plain_and_dynamic(self, prefixes: PrefixCache, model: Any) -> None:
        static = StaticCache(config=model.config, max_cache_len=64)
        offloaded = DynamicCache(config=model.config)
        offloaded.offloading = True
        with pytest.raises(kvtide.UnsupportedLayer, match="StaticCache"):
            await prefixes.store(prompt(40), static)
        with pytest.raises(kvtide.UnsupportedLayer, match="offloaded"):
            await prefixes.store(prompt(40), offloaded)
        with pytest.raises(kvtide.UnsupportedLayer, match="layer 0"):
            await prefixes.store(prompt(40), DynamicCache(config=model.config))


class TestApart:
    """What must not hit."""

    async def test_salts_and_extras(self, prefixes: PrefixCache, model: Any) -> None:
        past = DynamicCache(config=model.config)
        greedy(model, prompt(40), past, new=1)
        await prefixes.store(prompt(40), past, salt="tenant", extra=b"lora")
        assert (await prefixes.load(prompt(40))).tokens == 0
        assert (await prefixes.load(prompt(40), salt="tenant")).tokens == 0
        assert (await prefixes.load(prompt(40), salt="tenant", extra=b"lora")).tokens == 32

    async def test_other_weights(self, cache: kvtide.Cache, prefixes: PrefixCache, model: Any) -> None:
        past = DynamicCache(config=model.config)
        greedy(model, prompt(40), past, new=1)
        await prefixes.store(prompt(40), past)
        other = make_model(seed=9)
        others = PrefixCache(cache, other, weights="seed-9")
        assert (await others.load(prompt(40))).tokens == 0
        past = DynamicCache(config=other.config)
        greedy(other, prompt(40), past, new=1)
        await others.store(prompt(40), past)
        assert (await others.load(prompt(40))).tokens == 32
        assert (await prefixes.load(prompt(40))).tokens == 32

    def test_the_namespace_is_the_computation_not_its_origin(self) -> None:
        here, there = LlamaConfig(**SIZES), LlamaConfig(**SIZES)
        there._name_or_path = "elsewhere"
        assert model_namespace(here) == model_namespace(there)
        there.rms_norm_eps = 1e-3
        assert model_namespace(here) != model_namespace(there)


class TestRefusals:
    @pytest.mark.parametrize(
        ("config", "says"),
        [
            (transformers.MistralConfig(**SIZES, sliding_window=8), "layer 0 is a DynamicSlidingWindowLayer"),
            (
                transformers.Lfm2Config(**SIZES, layer_types=["conv", "full_attention"]),
                "layer 0 is a LinearAttentionLayer",
            ),
            (
                LlamaConfig(
                    **SIZES, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
                ),
                "length of the whole prompt",
            ),
        ],
        ids=["sliding-window", "convolution", "dynamic-rope"],
    )
    async def test_layers_without_a_full_prefix(self, cache: kvtide.Cache, config: Any, says: str) -> None:
        with pytest.raises(kvtide.UnsupportedLayer, match=says):
            PrefixCache(cache, make_model(config), weights="seed-0")

    async def test_encoder_decoder(self, cache: kvtide.Cache) -> None:
        config = transformers.T5Config(
            vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4
        )
        with pytest.raises(kvtide.UnsupportedLayer, match="encoder"):
            PrefixCache(cache, transformers.T5ForConditionalGeneration(config), weights="seed-0")

    async def test_weights_need_a_name(self, cache: kvtide.Cache, model: Any) -> None:
        with pytest.raises(kvtide.InvalidRequest, match="weights"):
            PrefixCache(cache, model, weights="")

    @pytest.mark.parametrize(
        ("ids", "says"),
        [
            (torch.zeros((2, 8), dtype=torch.long), "batch of 2"),
            (torch.zeros((1, 8)), "integers"),
            (torch.zeros((1, 2, 8), dtype=torch.long), r"\[tokens\]"),
            (torch.zeros((1, 0), dtype=torch.long), "empty"),
            ([], "empty"),
        ],
        ids=["batch", "dtype", "dimensions", "empty-tensor", "empty-list"],
    )
    async def test_bad_prompts(self, prefixes: PrefixCache, ids: Any, says: str) -> None:
        with pytest.raises(kvtide.InvalidRequest, match=says):
            await prefixes.load(ids)

    async def test_ids_that_are_none(self, prefixes: PrefixCache, model: Any) -> None:
        past = DynamicCache(config=model.config)
        greedy(model, prompt(40), past, new=1)
        await prefixes.store(prompt(40), past)
        with pytest.raises(kvtide.InvalidRequest, match="integers"):
            await prefixes.load([-1] * 40)

    def test_prompts_may_be_lists_or_tensors(self) -> None:
        assert (
            prompt_tokens([1, 2])
            == prompt_tokens(torch.tensor([[1, 2]]))
            == prompt_tokens(torch.tensor([1, 2]))
        )


class _Later:
    """Pages whose transfer ends, and whose memory comes to rest, when the test says so."""

    def __init__(self, pages: Any, take: int = 0) -> None:
        self._pages, self._take = pages, take
        self.ended, self.rest = asyncio.Event(), asyncio.Event()
        self.resting = False

    def load(self, hit: Any, blocks: Any, **options: Any) -> Any:
        inner = self._pages.load(hit, blocks, **options)

        async def transfer() -> Any:
            loaded = await inner
            await self.ended.wait()
            return kvtide.Loaded(loaded.tokens - self._take, {"corrupt": self._take})

        return transfer()

    async def detach(self) -> None:
        self.resting = True
        await self.rest.wait()
        await self._pages.detach()


class TestTransfers:
    async def _stored(self, prefixes: PrefixCache, model: Any) -> list[int]:
        past = DynamicCache(config=model.config)
        answer = greedy(model, prompt(70), past)
        await prefixes.store(prompt(70), past)
        return answer

    def _intercept(
        self, prefixes: PrefixCache, monkeypatch: pytest.MonkeyPatch, take: int = 0
    ) -> list[_Later]:
        made: list[_Later] = []
        attach = prefixes._attach

        def later(*arguments: Any) -> Any:
            made.append(_Later(attach(*arguments), take))
            return made[-1]

        monkeypatch.setattr(prefixes, "_attach", later)
        return made

    @pytest.mark.parametrize("take", [16, 64])
    async def test_a_shortfall_is_computed_again(
        self, prefixes: PrefixCache, model: Any, monkeypatch: pytest.MonkeyPatch, take: int
    ) -> None:
        answer = await self._stored(prefixes, model)
        made = self._intercept(prefixes, monkeypatch, take)
        loading = asyncio.create_task(prefixes.load(prompt(70)))
        await asyncio.sleep(0)
        made[0].ended.set()
        made[0].rest.set()
        prefix = await loading
        assert (prefix.tokens, dict(prefix.shortfall)) == (64 - take, {"corrupt": take})
        assert prefix.past_key_values.get_seq_length() == prefix.tokens
        assert greedy(model, prompt(70)[:, prefix.tokens :], prefix.past_key_values) == answer

    async def test_a_cancelled_load_ends_when_its_memory_is_at_rest(
        self, prefixes: PrefixCache, model: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        await self._stored(prefixes, model)
        made = self._intercept(prefixes, monkeypatch)
        loading = asyncio.create_task(prefixes.load(prompt(70)))
        await asyncio.sleep(0)
        loading.cancel()
        for _ in range(3):
            await asyncio.sleep(0)
        assert made[0].resting
        assert not loading.done()
        made[0].rest.set()
        with pytest.raises(asyncio.CancelledError):
            await loading

    async def test_memory_outlives_a_load_that_was_cancelled_twice(
        self, prefixes: PrefixCache, model: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        await self._stored(prefixes, model)
        made = self._intercept(prefixes, monkeypatch)
        allocate = prefixes._allocate
        tensors: list[weakref.ref[torch.Tensor]] = []

        def watched(tokens: int) -> Any:
            fresh = allocate(tokens)
            tensors.extend(weakref.ref(tensor) for pair in fresh for tensor in pair)
            return fresh

        monkeypatch.setattr(prefixes, "_allocate", watched)
        loading = asyncio.create_task(prefixes.load(prompt(70)))
        await asyncio.sleep(0)
        for _ in range(2):
            loading.cancel()
            for _ in range(3):
                await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await loading
        del loading
        gc.collect()
        assert all(tensor() is not None for tensor in tensors)
        made[0].rest.set()
        for _ in range(3):
            await asyncio.sleep(0)
        made.clear()
        gc.collect()
        assert all(tensor() is None for tensor in tensors)
