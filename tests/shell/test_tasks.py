"""Tasks around Hugging Face models: what they compute, and what they must not do on the way."""

import math

import pytest
import torch
import transformers
from torch.profiler import ProfilerActivity, profile

from dormouse.model.loaded import prepared
from dormouse.model.tasks import NextToken
from tests.shell.tiny_models import TEXT

VOCABULARY = 5000


@pytest.mark.parametrize("batch", [1, 3])
def test_next_token_scores_are_those_of_the_last_position_and_no_weight_is_copied(batch: int) -> None:
    torch.manual_seed(0)
    settings = {**TEXT, "vocab_size": VOCABULARY, "num_key_value_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))
    task = prepared(NextToken(model), "bfloat16")
    ids = torch.arange(7 * batch).reshape(batch, 7)
    with torch.inference_mode(), profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        scores = task(input_ids=ids)["logits"]
    with torch.no_grad():
        torch.testing.assert_close(scores, model(ids).logits[:, -1].float(), rtol=0, atol=0.02)
    copied = [math.prod(event.input_shapes[0]) for event in profiled.events() if event.name == "aten::copy_"]
    assert max(copied) < model.lm_head.weight.numel()
