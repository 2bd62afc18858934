"""One workspace for backends of several head shapes, whose layers run one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TypeVar

import torch

from shoal.attention.triton import TritonBackend
from shoal.kernels.attention.paged_attention import DecodeWorkspace, PrefillWorkspace

Workspace = TypeVar("Workspace", DecodeWorkspace, PrefillWorkspace)


def share_workspaces(backends: Sequence[object]) -> None:
    """Gives all of these that are TritonBackends the same memory for partial results, which is enough for
    each of them. The others keep theirs."""
    sharing = [backend for backend in backends if isinstance(backend, TritonBackend)]
    if len(sharing) > 1:
        decode = _largest([backend.workspace for backend in sharing])
        prefill = _largest([backend.prefill_workspace for backend in sharing])
        for backend in sharing:
            backend.workspace, backend.prefill_workspace = decode, prefill


def _largest(workspaces: Sequence[Workspace]) -> Workspace:
    """Returns a workspace of the largest tensor of each field."""
    names = [field.name for field in fields(workspaces[0])]
    tensors = ([getattr(workspace, name) for workspace in workspaces] for name in names)
    return type(workspaces[0])(*(max(own, key=torch.Tensor.numel) for own in tensors))
