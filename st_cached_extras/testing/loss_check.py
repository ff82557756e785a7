"""What every cached loss must satisfy: say how a loss and its plain truth are made, and inherit the checks."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.losses import column_merging_disabled
from sentence_transformers.sentence_transformer.losses import MatryoshkaLoss
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from torch import Tensor, nn

from st_cached_extras.objectives.base import ObjectiveResult
from st_cached_extras.replay.loss import ReplayLoss
from st_cached_extras.testing.tiny_models import (
    copy_columns,
    gradients,
    random_clips,
    relative_error,
    text_columns,
    tiny_text_model,
    tiny_two_tower_model,
    to_float64,
)

FLOAT64_TOLERANCE = 1e-10
FLOAT32_TOLERANCE = 1e-5


class LossEqualityCase(ABC):
    """Inherited checks that every cached loss passes, whatever its columns and labels, beside its plain form.

    Attributes:
        num_columns: how many text columns the loss is given.
    """

    num_columns = 2

    @abstractmethod
    def make_loss(self, model: SentenceTransformer, **kwargs: Any) -> ReplayLoss:
        """The cached loss; ``kwargs`` are arguments of :class:`ReplayLoss`."""

    @abstractmethod
    def make_plain_loss(self, model: SentenceTransformer) -> nn.Module:
        """The same loss without a cache: one forward per column, autograd through everything."""

    def make_labels(self, rows: int, seed: int) -> Tensor | None:
        """Labels of the rows, if the loss reads any."""
        return None

    def comparable(self, found: dict[str, Tensor]) -> dict[str, Tensor]:
        """The gradients that the plain loss has too, by names that are the same for both."""
        return _of_model(found)

    # -------------------------------------------------------------------------------------------------- helpers

    def step(
        self, loss: nn.Module, columns: list[dict], seed: int = 0, scale: float = 1.0
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Value and parameter gradients of one forward and backward."""
        loss.zero_grad()
        value = total(loss(copy_columns(columns), self.make_labels(_rows_of(columns), seed)))
        (value * scale).backward()
        return value.detach(), gradients(loss)

    def assert_equals_plain(
        self, model: SentenceTransformer, columns: list[dict], tolerance: float, seed: int = 0, **kwargs: Any
    ) -> None:
        """The cached loss has the value and gradients of the plain one, in float64."""
        plain_model, double = to_float64(copy.deepcopy(model), columns)
        expected, expected_gradients = self.step(self.make_plain_loss(plain_model), double, seed)
        if tolerance < 1e-7:
            model, columns = to_float64(copy.deepcopy(model), columns)
        found, found_gradients = self.step(self.make_loss(model, **kwargs), columns, seed)
        assert abs(found.double() - expected) <= tolerance * max(1.0, abs(expected))
        assert any(gradient.any() for gradient in expected_gradients.values()), "the truth must have a gradient"
        assert relative_error(self.comparable(found_gradients), self.comparable(expected_gradients)) <= tolerance

    # --------------------------------------------------------------------------------------- equal to the truth

    @pytest.mark.parametrize("tolerance", [FLOAT64_TOLERANCE, FLOAT32_TOLERANCE])
    def test_equals_the_plain_loss(self, tolerance):
        model = tiny_text_model()
        self.assert_equals_plain(model, text_columns(model, 7, self.num_columns, seed=7), tolerance, mini_batch_size=3)

    def test_a_token_budget_equals_the_plain_loss(self):
        model = tiny_text_model()
        columns = text_columns(model, 9, self.num_columns, seed=3)
        self.assert_equals_plain(model, columns, FLOAT64_TOLERANCE, mini_batch_num_tokens=40)

    @pytest.mark.parametrize("weights", [None, [1.0, 0.25]])
    def test_matryoshka_over_it_equals_matryoshka_over_the_plain_loss(self, weights):
        model, columns = _double_case(5, self.num_columns)
        plain = MatryoshkaLoss(model, self.make_plain_loss(model), [16, 8], weights)
        expected, expected_gradients = self.step(plain, columns)
        cached = MatryoshkaLoss(model, self.make_loss(model, mini_batch_size=2), [16, 8], weights)
        found, found_gradients = self.step(cached, columns)
        assert torch.allclose(found, expected, rtol=FLOAT64_TOLERANCE)
        found, expected = self.comparable(found_gradients), self.comparable(expected_gradients)
        assert relative_error(found, expected) <= FLOAT64_TOLERANCE

    # ------------------------------------------------------------------------------------------- how it replays

    def test_dropout_gradients_are_those_of_the_masks_that_the_first_pass_drew(self):
        model, columns = _double_case(4, self.num_columns, dropout=0.3)
        loss = self.make_loss(model, mini_batch_size=4, sort_by_length=False)
        plain = self.make_plain_loss(model)
        torch.manual_seed(11)
        _, found = self.step(loss, columns)
        torch.manual_seed(11)  # with one mini-batch per column, the plain loss draws the same masks in the same order
        with column_merging_disabled():
            _, expected = self.step(plain, columns)
        assert relative_error(self.comparable(found), self.comparable(expected)) <= FLOAT64_TOLERANCE

    def test_two_forwards_before_one_backward_keep_their_own_batches(self):
        model, first = _double_case(5, self.num_columns, seed=1)
        _, second = _double_case(4, self.num_columns, seed=2)
        loss = self.make_loss(model, mini_batch_size=2)
        _, first_gradients = self.step(loss, first)
        _, second_gradients = self.step(loss, second)
        loss.zero_grad()
        first_value = total(loss(copy_columns(first), self._labels(5)))
        second_value = total(loss(copy_columns(second), self._labels(4)))
        (first_value + 3 * second_value).backward()
        expected = {name: first_gradients[name] + 3 * second_gradients[name] for name in first_gradients}
        assert relative_error(gradients(loss), expected) <= FLOAT64_TOLERANCE

    @pytest.mark.parametrize("scale", [0.5, 2.0**16])
    def test_gradients_scale_with_the_outer_backward(self, scale):
        model, columns = _double_case(5, self.num_columns)
        loss = self.make_loss(model, mini_batch_size=2)
        _, expected = self.step(loss, columns)
        _, found = self.step(loss, columns, scale=scale)
        assert relative_error(found, {k: scale * v for k, v in expected.items()}) <= FLOAT64_TOLERANCE

    def test_gradients_accumulate_over_backwards(self):
        model, columns = _double_case(5, self.num_columns)
        loss = self.make_loss(model, mini_batch_size=2)
        _, once = self.step(loss, columns)
        for _ in range(2):
            total(loss(copy_columns(columns), self._labels(5))).backward()
        assert relative_error(gradients(loss), {k: 3 * v for k, v in once.items()}) <= FLOAT64_TOLERANCE

    def test_evaluation_without_gradients_gives_the_same_value_and_embeds_once(self):
        model, columns = _double_case(5, self.num_columns)
        loss = self.make_loss(model, mini_batch_size=2)
        expected, _ = self.step(loss, columns)
        seen = _record_embeddings(model)
        with torch.no_grad():
            value = total(loss(copy_columns(columns), self._labels(5)))
        assert torch.equal(value, expected) and not value.requires_grad
        assert len(seen) == 3 * self.num_columns

    def test_calculate_loss_is_differentiable_in_the_embeddings(self):
        model, columns = _double_case(5, self.num_columns)
        loss = self.make_loss(model)
        embeddings = [model(column)["sentence_embedding"].detach() for column in copy_columns(columns)]

        def value_and_grads(**kwargs: Any) -> tuple[Tensor, list[Tensor]]:
            leaves = [list(x.clone().split(2)) for x in embeddings]
            leaves = [[leaf.requires_grad_() for leaf in column] for column in leaves]
            value = loss.calculate_loss(leaves, self._labels(5), **kwargs)
            if not kwargs:
                (2 * value.sum()).backward()
            return value.detach(), [torch.cat([leaf.grad for leaf in column]) for column in leaves]

        value, doubled = value_and_grads()
        other, grads = value_and_grads(with_backward=True)
        assert torch.equal(value, other)
        assert all(torch.allclose(a, 2 * b, rtol=1e-12) for a, b in zip(doubled, grads, strict=True))

    def test_releases_its_state_after_the_backward(self):
        model = tiny_text_model()
        columns = text_columns(model, 5, self.num_columns)
        loss = self.make_loss(model, mini_batch_size=2)
        value = total(loss(columns, self._labels(5)))
        ids = weakref.ref(columns[0]["input_ids"])
        value.backward()
        del value, columns
        gc.collect()
        assert ids() is None

    # --------------------------------------------------------------------------------------- as an object of ST

    def test_deepcopies_and_pickles(self):
        model, columns = _double_case(5, self.num_columns)
        loss = self.make_loss(model, mini_batch_size=2)
        expected, expected_gradients = self.step(loss, columns)
        for copied in (copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
            value, found = self.step(copied, columns)
            assert torch.equal(value, expected)
            assert relative_error(found, expected_gradients) <= FLOAT64_TOLERANCE

    def test_the_configuration_is_plain_json_and_the_citation_bibtex(self):
        loss = self.make_loss(tiny_text_model())
        assert json.loads(json.dumps(loss.get_config_dict())) == loss.get_config_dict()
        assert loss.citation.strip().startswith("@")

    def test_adds_no_keys_to_the_models_state_dict(self):
        model = tiny_text_model()
        keys = set(model.state_dict())
        self.make_loss(model)
        assert set(model.state_dict()) == keys

    def _labels(self, rows: int) -> Tensor | None:
        return self.make_labels(rows, 0)


class LossCheckCase(LossEqualityCase):
    """Inherited checks of one cached loss with at least two columns, on tiny models, in all that it must stand."""

    # --------------------------------------------------------------------------------------- equal to the truth

    @pytest.mark.parametrize("tolerance", [FLOAT64_TOLERANCE, FLOAT32_TOLERANCE])
    @pytest.mark.parametrize("sort_by_length", [True, False])
    @pytest.mark.parametrize(("rows", "mini_batch_size"), [(7, 3), (6, 2), (5, 8), (4, 1)])
    def test_any_size_and_order_of_mini_batches_equal_the_plain_loss(
        self, rows, mini_batch_size, sort_by_length, tolerance
    ):
        model = tiny_text_model()
        columns = text_columns(model, rows, self.num_columns, seed=rows)
        self.assert_equals_plain(
            model, columns, tolerance, mini_batch_size=mini_batch_size, sort_by_length=sort_by_length
        )

    @pytest.mark.parametrize("budget", [1, 40, 10_000])
    def test_any_token_budget_equals_the_plain_loss(self, budget):
        model = tiny_text_model()
        columns = text_columns(model, 9, self.num_columns, seed=3)
        self.assert_equals_plain(model, columns, FLOAT64_TOLERANCE, mini_batch_num_tokens=budget)

    def test_a_batch_of_one_equals_the_plain_loss(self):
        model, columns = _double_case(1, self.num_columns)
        value, found = self.step(self.make_loss(model), columns)
        expected_value, expected = self.step(self.make_plain_loss(model), columns)
        assert torch.allclose(value, expected_value, atol=FLOAT64_TOLERANCE)
        found, expected = self.comparable(found), self.comparable(expected)
        difference = {name: found[name] - expected[name] for name in expected}
        assert max(float(x.abs().max()) for x in difference.values()) <= FLOAT64_TOLERANCE

    @pytest.mark.parametrize("sort_by_length", [True, False])
    def test_left_padding_equals_the_plain_loss(self, sort_by_length):
        model = tiny_text_model(padding_side="left")
        columns = text_columns(model, 7, self.num_columns, seed=4)
        self.assert_equals_plain(model, columns, FLOAT64_TOLERANCE, mini_batch_size=3, sort_by_length=sort_by_length)

    @pytest.mark.parametrize("sort_by_length", [True, False])
    @pytest.mark.parametrize("form", [int, lambda n: torch.tensor([n]), lambda n: torch.full((7,), n)])
    def test_prompts_left_out_of_the_pooling_equal_the_plain_loss(self, form, sort_by_length):
        model = tiny_text_model(include_prompt=False)
        columns = text_columns(model, 7, self.num_columns, seed=5, prompt="w1 w2 w3 ")
        for column in columns:
            column["prompt_length"] = form(column["prompt_length"])
        self.assert_equals_plain(model, columns, FLOAT64_TOLERANCE, mini_batch_size=3, sort_by_length=sort_by_length)

    def test_a_router_of_text_and_video_equals_the_plain_loss(self):
        model = tiny_two_tower_model()
        columns = [
            *text_columns(model, 5, self.num_columns - 1, seed=6),
            model.preprocess(random_clips(5, seed=6)),
        ]
        self.assert_equals_plain(model, columns, FLOAT64_TOLERANCE, mini_batch_size=2)

    def test_gradient_checkpointing_equals_the_plain_loss(self):
        model = tiny_text_model()
        columns = text_columns(model, 5, self.num_columns, seed=7)
        _, expected = self.step(self.make_plain_loss(copy.deepcopy(model)), columns)
        model[0].model.gradient_checkpointing_enable({"use_reentrant": False})
        _, found = self.step(self.make_loss(model, mini_batch_size=2), columns)
        assert relative_error(self.comparable(found), self.comparable(expected)) <= FLOAT32_TOLERANCE

    def test_lora_trains_as_with_the_plain_loss(self):
        from peft import LoraConfig, inject_adapter_in_model

        model = tiny_text_model()
        inject_adapter_in_model(
            LoraConfig(r=2, target_modules=["query", "value"], init_lora_weights=False), model[0].model
        )
        self.assert_equals_plain(
            model, text_columns(model, 5, self.num_columns, seed=8), FLOAT64_TOLERANCE, mini_batch_size=2
        )

    # ------------------------------------------------------------------------------------------- how it replays

    def test_replays_dropout_bit_for_bit_in_the_backward_pass(self):
        model = tiny_text_model(dropout=0.3)
        seen = _record_embeddings(model)
        loss = total(
            self.make_loss(model, mini_batch_size=2)(text_columns(model, 5, self.num_columns), self._labels(5))
        )
        collected = list(seen)
        before = torch.get_rng_state()
        loss.backward()
        replayed = seen[len(collected) :]
        assert len(replayed) == len(collected) == 3 * self.num_columns
        assert all(any(torch.equal(first, second) for second in replayed) for first in collected)
        assert torch.equal(torch.get_rng_state(), before), "the replay leaves the global random state alone"

    def test_the_callers_features_are_left_untouched(self):
        model = tiny_text_model(include_prompt=False)
        columns = text_columns(model, 5, self.num_columns, prompt="w1 w2 ")
        before = copy_columns(columns)
        total(self.make_loss(model, mini_batch_size=2)(columns, self._labels(5))).backward()
        for column, original in zip(columns, before, strict=True):
            assert column.keys() == original.keys()
            assert all(torch.equal(torch.as_tensor(column[k]), torch.as_tensor(original[k])) for k in _tensors(column))

    @pytest.mark.parametrize("backward_inside", [True, False])
    @pytest.mark.parametrize("frozen", ["nothing", "embeddings"])
    def test_bfloat16_autocast_equals_the_plain_loss_on_the_same_embeddings(self, frozen, backward_inside):
        model = tiny_text_model()
        if frozen == "embeddings":
            model[0].model.embeddings.requires_grad_(False)
        columns = text_columns(model, 6, self.num_columns)
        loss = self.make_loss(model, mini_batch_size=6, sort_by_length=False)
        plain = self.make_plain_loss(model)
        with torch.autocast("cpu", torch.bfloat16):
            value = total(loss(copy_columns(columns), self._labels(6)))
            if backward_inside:
                value.backward()
        if not backward_inside:
            value.backward()
        found = _of_model(gradients(loss))
        loss.zero_grad()
        # Plain: the model under autocast, its objective in fp32, as ours is; one forward per column.
        with torch.autocast("cpu", torch.bfloat16):
            embeddings = [model(column)["sentence_embedding"] for column in copy_columns(columns)]
        expected = plain.compute_loss_from_embeddings([x.float() for x in embeddings], self._labels(6))
        expected.backward()
        assert value.dtype == torch.float32
        assert torch.allclose(value.detach(), expected.detach(), rtol=1e-5)
        assert relative_error(found, _of_model(gradients(plain))) <= 1e-2

    def test_float16_cotangents_survive_under_a_loss_scale(self):
        model, columns = _double_case(6, self.num_columns)
        _, expected = self.step(self.make_plain_loss(model), columns)
        loss = self.make_loss(_RoundedTo(torch.float16, model), mini_batch_size=2)
        tiny = 2.0**-24  # times a cotangent: nothing, in float16
        compute = loss.objective.value_and_cotangents

        def shrunk(*args: Any, **kwargs: Any) -> ObjectiveResult:
            result = compute(*args, **kwargs)
            cotangents = {name: tiny * cotangent for name, cotangent in result.cotangents.items()}
            return ObjectiveResult(result.loss, cotangents, result.parameter_cotangents)

        loss.objective.value_and_cotangents = shrunk
        _, found = self.step(loss, columns, scale=1 / tiny)
        assert relative_error(_of_model(found), _of_model(expected)) <= 1e-2

    def test_an_overflowing_step_is_skipped_by_the_gradient_scaler(self):
        model = tiny_text_model()
        columns = text_columns(model, 5, self.num_columns)
        loss = self.make_loss(model, mini_batch_size=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=float(2.0**127), growth_interval=1000)
        before = copy.deepcopy(model.state_dict())
        scaler.scale(total(loss(copy_columns(columns), self._labels(5))) * 1e6).backward()
        scaler.step(optimizer)
        scaler.update()
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
        optimizer.zero_grad()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
        scaler.scale(total(loss(copy_columns(columns), self._labels(5)))).backward()
        scaler.step(optimizer)
        assert any(not torch.equal(before[name], value) for name, value in model.state_dict().items())

    def test_a_frozen_tower_is_embedded_once_and_the_other_trains(self):
        model = tiny_two_tower_model()
        columns = [*text_columns(model, 6, self.num_columns - 1), model.preprocess(random_clips(6))]
        model[0].sub_modules["video"].requires_grad_(False)
        self.assert_equals_plain(model, columns, FLOAT64_TOLERANCE, mini_batch_size=2)
        calls = {route: _count_calls(tower[0]) for route, tower in model[0].sub_modules.items()}
        self.step(self.make_loss(model, mini_batch_size=2), columns)
        assert len(calls["video"]) == 3
        assert len(calls["text"]) == 2 * 3 * (self.num_columns - 1)

    def test_a_column_that_the_model_embeds_without_a_graph_does_not_stop_the_others(self):
        model, columns = _double_case(5, self.num_columns)
        plain = self.make_plain_loss(copy.deepcopy(model))
        detached = [plain.model(column)["sentence_embedding"] for column in copy_columns(columns)]
        detached[-1] = detached[-1].detach()
        plain.compute_loss_from_embeddings(detached, self._labels(5)).backward()
        model = _WithoutGraph(model)
        columns[-1]["without_graph"] = "yes"
        _, found = self.step(self.make_loss(model, mini_batch_size=2), columns)
        assert relative_error(_of_model(found), _of_model(gradients(plain))) <= FLOAT64_TOLERANCE

    def test_inputs_that_the_model_overwrites_are_replayed_as_they_were(self):
        model = tiny_two_tower_model()
        columns = [*text_columns(model, 5, self.num_columns - 1), model.preprocess(random_clips(5))]
        model[0].sub_modules["video"].insert(0, _OverwritesPixels())
        before = copy_columns(columns)
        plain = copy.deepcopy(model)
        _, expected = self.step(self.make_plain_loss(plain), columns)
        loss = self.make_loss(model, mini_batch_size=2)
        total(loss(columns, self._labels(5))).backward()
        assert relative_error(_of_model(gradients(loss)), _of_model(expected)) <= FLOAT32_TOLERANCE
        assert torch.equal(columns[-1]["pixel_values"], before[-1]["pixel_values"])

    def test_rows_without_a_trainable_part_do_not_freeze_the_rest_of_their_column(self):
        model = tiny_text_model()
        model[0].model.requires_grad_(False)
        model.append(_AdapterForOddRows(16))
        columns = text_columns(model, 7, self.num_columns, seed=9)
        self.assert_equals_plain(model, columns, FLOAT64_TOLERANCE, mini_batch_size=1, sort_by_length=False)
        self.assert_equals_plain(model, columns, FLOAT64_TOLERANCE, mini_batch_size=2)

    @pytest.mark.parametrize("dropout", [0.0, 0.2])
    @pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
    def test_kept_graphs_change_no_bit_of_the_gradients_and_save_forwards(self, share, dropout):
        model = tiny_text_model(dropout=dropout)
        columns = text_columns(model, 8, self.num_columns)
        results = {}
        for kept in (0.0, share):
            torch.manual_seed(3)
            calls = _count_calls(model[0])
            results[kept] = self.step(self.make_loss(model, mini_batch_size=2, kept_graphs=kept), columns)
            results[kept] += (len(calls),)
        (value, expected, calls), (kept_value, found, fewer_calls) = results.values()
        assert torch.equal(value, kept_value)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert calls == 8 * self.num_columns and fewer_calls == calls - round(share * 4 * self.num_columns)

    @pytest.mark.parametrize("share", [-0.1, 1.5, "half", True])
    def test_refuses_a_share_of_kept_graphs_that_is_none(self, share):
        with pytest.raises(ValueError, match="kept_graphs must be a share between 0 and 1"):
            self.make_loss(tiny_text_model(), kept_graphs=share)

    def test_random_states_are_kept_only_where_numbers_were_drawn(self):
        for dropout, expected in ((0.0, 0), (0.3, 3 * self.num_columns)):
            model = tiny_text_model(dropout=dropout)
            loss = self.make_loss(model, mini_batch_size=2)
            kept = []
            replay = loss._replay
            loss._replay = lambda *args, kept=kept, replay=replay, **kwargs: (
                kept.extend(state for column in kwargs["columns"] for state in column.random_states),
                replay(*args, **kwargs),
            )[1]
            total(loss(text_columns(model, 5, self.num_columns), self._labels(5))).backward()
            assert sum(state is not None for state in kept) == expected

    def test_a_wholly_frozen_model_has_a_value_and_is_not_replayed(self):
        model = tiny_text_model().requires_grad_(False)
        seen = _record_embeddings(model)
        self.step(self.make_loss(model, mini_batch_size=2), text_columns(model, 4, self.num_columns))
        assert len(seen) == 2 * self.num_columns

    def test_rows_of_like_length_share_a_mini_batch(self):
        model = tiny_text_model()
        columns = text_columns(model, 12, self.num_columns, seed=1)
        widths = _count_calls(model[0], lambda features: features["input_ids"].shape)
        self.step(self.make_loss(model, mini_batch_size=4), columns)
        sorted_area = sum(rows * width for rows, width in widths)
        per_column = widths[: 3 * self.num_columns]
        for column in range(self.num_columns):
            assert all(a[1] >= b[1] for a, b in pairwise(per_column[3 * column : 3 * column + 3]))
        widths.clear()
        self.step(self.make_loss(model, mini_batch_size=4, sort_by_length=False), columns)
        assert sorted_area < sum(rows * width for rows, width in widths)

    # ------------------------------------------------------------------------------------------------ bad input

    @pytest.mark.parametrize("argument", ["mini_batch_size", "mini_batch_num_tokens"])
    @pytest.mark.parametrize(("value", "error"), [(0, ValueError), (-3, ValueError), (2.5, TypeError)])
    def test_refuses_a_size_that_is_not_a_positive_integer(self, argument, value, error):
        with pytest.raises(error, match=f"{argument} must be a positive integer, got {value}"):
            self.make_loss(tiny_text_model(), **{argument: value})

    def test_refuses_static_embeddings(self):
        model = SentenceTransformer(
            modules=[StaticEmbedding(tiny_text_model().tokenizer.backend_tokenizer, embedding_dim=8)], device="cpu"
        )
        with pytest.raises(ValueError, match="StaticEmbedding"):
            self.make_loss(model)

    def test_refuses_what_is_not_a_sentence_transformer(self):
        with pytest.raises(TypeError, match="SentenceTransformer models, got model=Linear"):
            self.make_loss(nn.Linear(2, 2))

    def test_unequal_row_counts_are_named(self):
        model = tiny_text_model()
        columns = [*text_columns(model, 5, self.num_columns - 1), *text_columns(model, 4, 1)]
        with pytest.raises(ValueError, match=r"same positive number of rows, got anchor: 5.*: 4"):
            self.make_loss(model)(columns, self._labels(5))

    def test_non_finite_embeddings_are_named_by_column_and_row(self):
        model = tiny_text_model()
        columns = text_columns(model, 5, self.num_columns)
        columns[1] = model.preprocess(["w1", "w2", "w63", "w3", "w63"])
        columns[0] = model.preprocess(["w1", "w2", "w4", "w3", "w5"])
        row = columns[1]["input_ids"][2, 1]
        model[0].model.embeddings.word_embeddings.weight.data[row] = float("nan")
        with pytest.raises(ValueError, match=r"NaN or infinity \(column positive: row\(s\) 2, 4[;)]"):
            self.make_loss(model, mini_batch_size=2)(columns, self._labels(5))

    def test_an_unused_column_is_named(self):
        loss = self.make_loss(tiny_text_model())
        columns = text_columns(loss.model, 4, self.num_columns)
        to_features = loss.to_features
        loss.to_features = lambda reps: {**to_features(reps), "spare": reps[0]}
        compute = loss.objective.value_and_cotangents
        loss.objective.value_and_cotangents = lambda features, **kwargs: compute(
            {name: feature for name, feature in features.items() if name != "spare"}, **kwargs
        )
        with pytest.raises(ValueError, match=r"did not use the input column\(s\) spare"):
            loss(columns, self._labels(4))


class _AdapterForOddRows(nn.Module):
    """The only trainable module of a model, and only for rows with an odd first word."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, features: dict) -> dict:
        embeddings = features["sentence_embedding"]
        odd = features["input_ids"][:, 1] % 2 == 1
        if odd.any():
            features["sentence_embedding"] = torch.where(odd[:, None], self.linear(embeddings), embeddings)
        return features


class _WithoutGraph(SentenceTransformer):
    """A model that embeds some inputs without a graph, although all its parameters are trainable."""

    def __init__(self, model: SentenceTransformer) -> None:
        super().__init__(modules=list(model), device="cpu")

    def forward(self, features: dict, **kwargs: Any) -> dict:
        with torch.set_grad_enabled(torch.is_grad_enabled() and features.pop("without_graph", None) is None):
            return super().forward(features, **kwargs)


class _OverwritesPixels(nn.Module):
    def forward(self, features: dict, **kwargs: Any) -> dict:
        features["pixel_values"].mul_(2.0).add_(0.1)
        return features


class _RoundedTo(SentenceTransformer):
    """A model whose embeddings come out in another dtype."""

    def __init__(self, dtype: torch.dtype, model: SentenceTransformer) -> None:
        super().__init__(modules=list(model), device="cpu")
        self.rounded_to = dtype

    def forward(self, features: dict, **kwargs: Any) -> dict:
        features = super().forward(features, **kwargs)
        features["sentence_embedding"] = features["sentence_embedding"].to(self.rounded_to)
        return features


def total(value: Tensor | dict[str, Tensor]) -> Tensor:
    """The loss, of which a dict holds the parts, as the Trainer reads it."""
    return sum(value.values()) if isinstance(value, dict) else value


def _rows_of(columns: list[dict]) -> int:
    return len(next(value for value in columns[0].values() if isinstance(value, Tensor) and value.ndim > 1))


def _double_case(
    rows: int, num_columns: int, seed: int = 0, dropout: float = 0.0
) -> tuple[SentenceTransformer, list[dict]]:
    model = tiny_text_model(dropout=dropout)
    return to_float64(model, text_columns(model, rows, num_columns, seed=seed))


def _of_model(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gradients by parameter name within the model, whatever wraps it; its copies inside wrappers fall together."""
    return {name.rsplit("model.0.", 1)[-1]: gradient for name, gradient in found.items() if "model.0." in name}


def _tensors(column: dict) -> list[str]:
    return [key for key, value in column.items() if isinstance(value, Tensor)]


def _record_embeddings(model: SentenceTransformer) -> list[Tensor]:
    seen: list[Tensor] = []
    model.register_forward_hook(lambda module, args, out: seen.append(out["sentence_embedding"].detach().clone()))
    return seen


def _count_calls(module: nn.Module, what: Callable[[dict], Any] = lambda features: 1) -> list[Any]:
    seen: list[Any] = []
    module.register_forward_pre_hook(lambda module, args: seen.append(what(args[0])))
    return seen
