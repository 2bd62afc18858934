"""Mixtures of experts of a config: which layers have them, and checks of their numbers. No torch."""

from __future__ import annotations

from dataclasses import replace

from shoal.errors import CheckpointError
from shoal.kinds.experts import ExpertsKind, Router, SharedExpert
from shoal.model_config import ModelConfig
from shoal.models.configs.fields import ConfigFields

DENSE, SPARSE = "dense", "sparse"


def with_experts(config: ModelConfig, fields: ConfigFields, experts: ExpertsKind | None) -> ModelConfig:
    """Returns the config with these experts in the layers that the fields name: by `mlp_layer_types`, or else
    after `first_k_dense_replace` layers, but for `mlp_only_layers`, in each layer of a number that is a
    multiple of `decoder_sparse_step`. None: all layers are dense."""
    if experts is None:
        return config
    check_experts(experts, fields)
    layers = zip(config.layers, _sparse_layers(fields, config.num_layers))
    return replace(
        config, layers=tuple(replace(kind, experts=experts) if sparse else kind for kind, sparse in layers)
    )


def routed_experts(
    fields: ConfigFields, router: Router, count: str = "n_routed_experts", shared: str = "n_shared_experts"
) -> ExpertsKind:
    """The experts of DeepSeek V2 and of the models after it. `count`, `shared`: fields with the number of
    experts, and with how many of them the shared one is wide."""
    return ExpertsKind(
        fields.count(count),
        fields.count("moe_intermediate_size"),
        router,
        shared=shared_experts(fields, shared),
    )


def shared_experts(fields: ConfigFields, key: str) -> SharedExpert | None:
    """The shared expert of a config that says how many experts wide it is."""
    count = fields.count(key, 0, least=0)
    return SharedExpert(count * fields.count("moe_intermediate_size")) if count else None


def sigmoid_router(fields: ConfigFields) -> Router:
    """The router of DeepSeek V3 and of the models after it."""
    return Router(
        fields.count("num_experts_per_tok"),
        fields.flag("norm_topk_prob"),
        scores="sigmoid",
        eps=1e-20,
        scale=fields.number("routed_scaling_factor", 1.0),
        num_groups=fields.count("n_group", 1),
        top_k_groups=fields.count("topk_group", 1),
        group_score="two best",
        float32=True,
        correction=True,
    )


def _sparse_layers(fields: ConfigFields, num_layers: int) -> list[bool]:
    kinds = fields.get("mlp_layer_types")
    if kinds is not None:
        known = isinstance(kinds, list) and all(kind in (DENSE, SPARSE) for kind in kinds)
        if not known or len(kinds) != num_layers:
            raise CheckpointError(
                f"{fields.where}: mlp_layer_types must be {DENSE} or {SPARSE} for each of {num_layers} "
                f"layers, got {kinds!r:.80}"
            )
        return [kind == SPARSE for kind in kinds]
    first, step = fields.count("first_k_dense_replace", 0, least=0), fields.count("decoder_sparse_step", 1)
    dense = _mlp_only_layers(fields, num_layers)
    return [i >= first and i not in dense and (i + 1) % step == 0 for i in range(num_layers)]


def _mlp_only_layers(fields: ConfigFields, num_layers: int) -> tuple[int, ...]:
    layers = fields.get("mlp_only_layers") or []
    known = isinstance(layers, list) and len(layers) <= num_layers
    if not known or not all(type(i) is int and 0 <= i < num_layers for i in layers):
        raise CheckpointError(
            f"{fields.where}: mlp_only_layers must be layers from 0 to {num_layers - 1}, got {layers!r:.80}"
        )
    return tuple(layers)


def check_experts(experts: ExpertsKind, fields: ConfigFields) -> None:
    """Raises CheckpointError for numbers that contradict one another."""
    router, where, total = experts.router, fields.where, experts.num_experts
    if router.top_k > total:
        raise CheckpointError(f"{where}: num_experts_per_tok {router.top_k} is more than num_experts {total}")
    groups, kept = router.num_groups, router.top_k_groups
    least = 2 if router.group_score == "two best" and groups > 1 else 1
    if total % groups or total // groups < least:
        raise CheckpointError(
            f"{where}: n_group must divide num_experts {total} into groups of {least} or more, got {groups}"
        )
    if not kept <= groups or router.top_k > total // groups * kept:
        raise CheckpointError(
            f"{where}: topk_group must be at most n_group {groups}, and leave {router.top_k} experts to "
            f"choose, got {kept}"
        )
