"""Vision models of transformers as training steps: small configurations, random weights."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
from torch import nn

import irongrad as ig

CLASSES = 5
BATCH = 2


def _classifier(kind: type[nn.Module], config: Any, size: int = 32) -> ig.TrainStep:
    model = kind(config)
    inputs = {"pixel_values": torch.randn(BATCH, 3, size, size), "labels": torch.randint(0, CLASSES, (BATCH,))}
    return ig.TrainStep(
        model=model, loss=None, optimizer=torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9), inputs=inputs
    )


_TRANSFORMER = {
    "image_size": 32,
    "patch_size": 8,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "num_labels": CLASSES,
    "hidden_dropout_prob": 0.1,
}


def vit() -> ig.TrainStep:
    """Dosovitskiy et al., arXiv:2010.11929."""
    return _classifier(hf.ViTForImageClassification, hf.ViTConfig(**_TRANSFORMER))


def deit() -> ig.TrainStep:
    """Touvron et al., arXiv:2012.12877."""
    return _classifier(hf.DeiTForImageClassification, hf.DeiTConfig(**_TRANSFORMER))


def swin() -> ig.TrainStep:
    """Liu et al., arXiv:2103.14030; with stochastic depth."""
    config = hf.SwinConfig(
        image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4, num_labels=CLASSES
    )
    return _classifier(hf.SwinForImageClassification, config)


def convnext() -> ig.TrainStep:
    """Liu et al., arXiv:2201.03545; with stochastic depth."""
    config = hf.ConvNextConfig(hidden_sizes=[16, 32], depths=[2, 2], num_stages=2, drop_path_rate=0.1)
    config.num_labels = CLASSES
    return _classifier(hf.ConvNextForImageClassification, config)


def resnet() -> ig.TrainStep:
    """He et al., arXiv:1512.03385."""
    config = hf.ResNetConfig(embedding_size=8, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic")
    config.num_labels = CLASSES
    return _classifier(hf.ResNetForImageClassification, config)


def mobilenet_v2() -> ig.TrainStep:
    """Sandler et al., arXiv:1801.04381."""
    config = hf.MobileNetV2Config(image_size=32, depth_multiplier=0.25, classifier_dropout_prob=0.2)
    config.num_labels = CLASSES
    return _classifier(hf.MobileNetV2ForImageClassification, config)


def efficientnet() -> ig.TrainStep:
    """Tan and Le, arXiv:1905.11946."""
    config = hf.EfficientNetConfig(
        image_size=32, width_coefficient=0.25, depth_coefficient=0.2, hidden_dim=320, in_channels=[32, 16, 24],
        out_channels=[16, 24, 40], kernel_sizes=[3, 3, 5], strides=[1, 2, 2], num_block_repeats=[1, 1, 1],
        expand_ratios=[1, 6, 6],
    )  # fmt: skip
    config.num_labels = CLASSES
    return _classifier(hf.EfficientNetForImageClassification, config)


def segformer() -> ig.TrainStep:
    """Xie et al., arXiv:2105.15203: per-pixel labels."""
    config = hf.SegformerConfig(
        num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[16, 32], patch_sizes=[7, 3],
        strides=[4, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2], decoder_hidden_size=32,
    )  # fmt: skip
    config.num_labels = CLASSES
    model = hf.SegformerForSemanticSegmentation(config)
    inputs = {"pixel_values": torch.randn(BATCH, 3, 32, 32), "labels": torch.randint(0, CLASSES, (BATCH, 32, 32))}
    return ig.TrainStep(model=model, loss=None, optimizer=torch.optim.SGD(model.parameters(), lr=1e-2), inputs=inputs)


MODELS = {
    "ViT": vit,
    "DeiT": deit,
    "Swin": swin,
    "ConvNeXt": convnext,
    "ResNet": resnet,
    "MobileNetV2": mobilenet_v2,
    "EfficientNet": efficientnet,
    "SegFormer": segformer,
}
