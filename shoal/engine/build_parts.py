"""Builds the parts that one engine has in addition to its core, as its options say."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from shoal.config import ResolvedConfig
from shoal.engine.answer_keeper import AnswerKeeper
from shoal.engine.block_events import BlockEvents
from shoal.engine.cost_learner import CostLearner
from shoal.engine.draft_learner import DraftLearner
from shoal.engine.grammar_admission import GrammarAdmission
from shoal.engine.lifecycle.weight_exports import WeightExports
from shoal.engine.offload.tiers import KvTiers
from shoal.engine.pause_state import PauseState
from shoal.engine.peers.peers import KvPeers
from shoal.engine.peers.prefetches import Prefetches
from shoal.engine.ranks.ranks import Ranks
from shoal.engine.scheduling.grammar import Grammars
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.engine.step_part import PartBuilder, StepPart
from shoal.kv.events.publisher import KvEvents
from shoal.text.tokenizer import load_tokenizer
from shoal.weights.source import CheckpointFiles


def build_parts(
    config: ResolvedConfig,
    files: CheckpointFiles,
    ranks: Ranks,
    scheduler: Scheduler,
    events: KvEvents | None,
    paused: PauseState,
    checkpoint: Callable[[], CheckpointFiles | None],
    more_parts: Sequence[PartBuilder],
) -> Iterator[StepPart]:
    """Yields the parts in the order that step_part.Parts explains; each is built when the ones before it are
    in use. `checkpoint()` is what the weights were read from."""
    grammars = Grammars(
        lambda: load_tokenizer(files, config.tokenizer),
        files.config.vocab_size,
        files.eos_token_ids,
        config.closes_objects,
        config.structured_outputs_config.disable_any_whitespace,
    )
    options = config.speculative
    yield GrammarAdmission(grammars, scheduler, 0 if options is None else options.queries - 1)
    if config.target_itl_ms:
        yield CostLearner(scheduler)
    drafting = ranks.runner.drafting
    if options is not None and drafting is not None:
        yield DraftLearner(config, options, scheduler, drafting.clock)
        if drafting.earlier is not None:
            yield AnswerKeeper(drafting.earlier, scheduler)
    if config.has_kv_tiers:
        yield KvTiers(config, ranks, scheduler, events)
    if config.kv_transfer_config is not None:
        yield (peers := KvPeers(config, ranks, scheduler, checkpoint))
        peers.name_model()
        if config.kv_transfer_config.reads:
            yield Prefetches(scheduler)
    yield WeightExports(config, ranks, paused, checkpoint)
    for build in more_parts:
        yield build(config, ranks, scheduler)
    if events is not None:
        yield BlockEvents(events, scheduler.blocks)
