"""MiniLM with LoRA on query and value and a new classifier, for the topics of news: `minilm.py:make_step`.

Low-rank adapters: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2021, arXiv:2106.09685).
"""

from __future__ import annotations

from pathlib import Path

import news
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.nn import functional as F
from transformers import BertForSequenceClassification
from transformers.modeling_outputs import SequenceClassifierOutput

import irongrad as ig


def classifier(folder: Path | None = None, layers: int = 6) -> BertForSequenceClassification:
    """MiniLM with a classifier that is not trained yet.

    Args:
        folder: MiniLM's folder; `build/minilm` by default.
        layers: how many of its six layers to take, for a quick test.
    """
    torch.manual_seed(0)
    model = BertForSequenceClassification.from_pretrained(
        folder or news.base(),
        num_labels=5,
        num_hidden_layers=layers,
        # Without dropout, the compiled step and eager PyTorch train alike.
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    assert isinstance(model, BertForSequenceClassification)
    return model


def adapted(model: BertForSequenceClassification, rank: int = 8) -> PeftModel:
    """The model with LoRA: everything is frozen but the adapter and the classifier."""
    config = LoraConfig(task_type="SEQ_CLS", r=rank, lora_alpha=2 * rank, target_modules=["query", "value"])
    model_with_adapter = get_peft_model(model, config)
    assert isinstance(model_with_adapter, PeftModel)
    return model_with_adapter


def loss(outputs: SequenceClassifierOutput, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy: logits float32 [B, 5], int64 [B] -> scalar."""
    return F.cross_entropy(outputs.logits, labels)


def make_step(
    batch: int = 16,
    length: int = news.LENGTH,
    layers: int = 6,
    rank: int = 8,
    folder: Path | None = None,
    form: str | None = None,
) -> ig.TrainStep:
    """AdamW over the adapter and the classifier; `form` quantises everything else, to `int8`, `int4` or `bf16`."""
    model = adapted(classifier(folder, layers), rank)
    if form is not None:
        ig.quantize(model, form)
    train, _ = news.tokens(length, folder)
    return ig.TrainStep(
        model,
        loss,
        torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3),
        {name: torch.from_numpy(array[:: len(array) // batch][:batch]) for name, array in train.items()},
        model_inputs=("input_ids", "attention_mask"),
        clip_grad_norm=1.0,
    )


def make_int8_step() -> ig.TrainStep:
    """`make_step` over a base in 8 bits."""
    return make_step(form="int8")


def make_int4_step() -> ig.TrainStep:
    """`make_step` over a base in 4 bits."""
    return make_step(form="int4")
