"""The operators, one file for each family; importing this package fills the table in `irongrad.onnx.registry`."""

from __future__ import annotations

from irongrad.onnx.operators import activations as activations
from irongrad.onnx.operators import attention as attention
from irongrad.onnx.operators import constants as constants
from irongrad.onnx.operators import control_flow as control_flow
from irongrad.onnx.operators import convolution as convolution
from irongrad.onnx.operators import elementwise as elementwise
from irongrad.onnx.operators import indexing as indexing
from irongrad.onnx.operators import normalisation as normalisation
from irongrad.onnx.operators import products as products
from irongrad.onnx.operators import recurrent as recurrent
from irongrad.onnx.operators import reductions as reductions
from irongrad.onnx.operators import resampling as resampling
from irongrad.onnx.operators import sequences as sequences
from irongrad.onnx.operators import shapes as shapes
