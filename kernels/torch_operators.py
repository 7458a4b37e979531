"""The compiled kernels as torch operators, ``torch.ops.pdserve.*``: what profilers, compilers and other models can see.

The engine does not go through them: an operator costs 2 to 8 microseconds more than the function that it wraps
(measured), and the first one that is called loads torch's compiler, 160 MB of memory.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import custom_op

from pdserve.kernels import cpp_kernels

linear = custom_op("pdserve::linear", cpp_kernels.linear, mutates_args=("out_TO",))
rms_norm = custom_op("pdserve::rms_norm", cpp_kernels.rms_norm, mutates_args=())
add_rms_norm = custom_op("pdserve::add_rms_norm", cpp_kernels.add_rms_norm, mutates_args=("residual_TD",))
silu_mul = custom_op("pdserve::silu_mul", cpp_kernels.silu_mul, mutates_args=())
rotate_and_store = custom_op("pdserve::rotate_and_store", cpp_kernels.rotate_and_store, mutates_args=("kv_layer",))
attend = custom_op("pdserve::attend", cpp_kernels.attend, mutates_args=())

# What tracing needs of each: the shape and dtype of its result.


@linear.register_fake
def _(*_: object) -> None:
    return None


@rms_norm.register_fake
def _(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x)


@add_rms_norm.register_fake
def _(_x_TD: Tensor, residual_TD: Tensor, *_: object) -> Tensor:
    return torch.empty_like(residual_TD)


@silu_mul.register_fake
def _(gate_up_T2I: Tensor, *_: object) -> Tensor:
    return gate_up_T2I.new_empty(gate_up_T2I.shape[0], gate_up_T2I.shape[1] // 2)


@rotate_and_store.register_fake
def _(q_TNH: Tensor, *_: object) -> Tensor:
    return q_TNH.new_empty(q_TNH.shape)


@attend.register_fake
def _(q_TNH: Tensor, *_: object) -> Tensor:
    return torch.empty_like(q_TNH)
