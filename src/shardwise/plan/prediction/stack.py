"""`Stack`: how our runtime executes a plan, as far as its price and its memory depend on it. No torch.

Physics is the same for everybody: bytes, FLOPs, links. Fields are what a plan decides (resolve/speed.py's `stack_of`).
Constants and methods are the points where another framework's step costs something else; each says what ours does.
They are the only way in for others: benchmarks/stacks/foreign.py overrides them, so that predictions can be tested on
runs that somebody published. Passes are bytes that one kernel reads and writes; a pass that runs below the memory's
rate is counted longer. Read next: operations.py, which asks for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from shardwise.plan.prediction.calibration import measured
from shardwise.plan.prediction.work import AttentionCore, Matmul, RankShape, RankWork, Training
from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import Plan
from shardwise.spec.precisions import FORMAT_BYTES

if TYPE_CHECKING:
    from shardwise.plan.prediction.rank_share import RankShare
    from shardwise.plan.prediction.states import Groups, RankStates

Passes = tuple[float, ...]

SHORT_ROW = measured("short_row")
NORM = measured("norm_pass")
CAST = measured("cast_pass")
LOOK, QUANTIZE, TRANSPOSE = measured("fp8_look"), measured("fp8_quantize"), measured("fp8_transpose")
EAGER_CAST = measured("fp8_eager_cast")
LOSS_PASSES = int(measured("fused_loss_passes"))
PLAIN_SOFTMAX = measured("plain_softmax")
EXPERT_IMBALANCE = measured("expert_imbalance")


class StateTraffic(NamedTuple):
    """The bytes of parameters and gradients between the ranks that share them, and whether computing hides them."""

    reduce_bytes: int  # per element of a gradient
    gather_bytes: int  # per element of a parameter
    overlaps_reduce: bool  # gradients travel while backward computes
    overlaps_gather: bool  # parameters travel while the layer before computes


@dataclass(frozen=True)
class Stack:
    """Our runtime with the tricks of one plan, as far as they are priced."""

    attention: str = "sdpa"  # the kernel: sdpa (cuDNN's, as torch calls it) | flash4
    fused_matmuls: bool = False  # queries, keys and values are one matmul; gate and up another
    side_by_side: tuple[str, ...] = ()  # of `qkv`, `gate up`: fused, but weights lie apart and are copied in every pass
    compiled: bool = False  # elementwise chains are one kernel each
    fused_activation: bool = False  # activation and gating are one kernel; compiled, they are that anyway
    fused_loss: bool = False  # softmax, loss and its gradient are one kernel over the logits
    logits_again: bool = True  # large logits are computed in chunks, and again in backward (model/loss.py)
    stops_early: bool = True  # a layer that is computed again stops before its last matmul; compiled, it is one graph
    chosen: bool = False  # of the library's kernels for a matmul the fastest (kernels/choose_matmul.py)
    fp8_least: int = 0  # matmuls with less of outputs * inputs / (outputs + inputs), and experts, stay in 16 bits
    fp8_rows: bool = False  # a scale per row; else one per tensor
    fp8_head: bool = False  # the head's matmuls too

    # The same for all plans of ours; each says what True means.
    knows_masks: ClassVar[bool] = False  # attention skips keys outside of a window, knows soft caps; else all pairs
    batch_first: ClassVar[bool] = True  # [batch, tokens, width]: what sequence parallelism gathers is put in order
    casts_gathered: ClassVar[bool] = True  # parameters are cast and copied when they are gathered, as FSDP2 does it
    overlaps_pipeline: ClassVar[bool] = True  # activations travel between stages while others compute; else both wait
    tied_bytes: ClassVar[int] = 4  # per element of a tied table's gradient between the two ends of a pipeline
    step_bytes: ClassVar[int] = 0  # per parameter that a rank updates: copies of the gradients that the update makes
    expert_load: ClassVar[float] = EXPERT_IMBALANCE  # tokens' copies at the experts of the fullest rank, over the mean
    wide_router: ClassVar[bool] = True  # scores of experts are computed in fp32, and so is what they are computed from
    holds_gathered: ClassVar[bool] = True  # a tensor-parallel region's whole input counts until backward
    ends_stay_gathered: ClassVar[bool] = False  # ZeRO-3 keeps embedding and head until backward ends, tied or not

    @property
    def measured(self) -> bool:
        """Whether matmuls, casts and passes are priced as profiles of our compiled blocks on an H200 say."""
        return self.compiled

    # Kernels --------------------------------------------------------------------------------------------------------

    def score_passes(self, core: AttentionCore, size: int, capped: bool) -> tuple[Passes, Passes] | None:
        """Returns the passes over attention's scores, forward and backward; None: a fused kernel has none. `capped`:
        softly, by model/attention.py: scaled, divided, tanh, multiplied, masked, softmax in fp32, cast back."""
        if not capped:
            return None
        elements = float(core.rows * core.heads * core.queries * core.keys)
        forward = (2 * size,) * 5 + (size + 4, 4 + size)
        backward = (4 + size, 12, 4 + size, 2 * size, 2 * size, 3 * size, 2 * size, 2 * size)
        return tuple(b * elements for b in forward), tuple(b * elements for b in backward)

    def block_passes(self, spec: ModelSpec, elements: float, size: int) -> tuple[Passes, Passes]:
        """Returns the passes of a block's norms and its two residual sums. x + y reads two tensors and writes one; in
        backward the two gradients that meet at a branch are added."""
        # Norm; sum and norm; sum, made anew from all of its parts. Backward reads them again for the norms' weights.
        if self.measured:
            return (9.0 * elements * size,), (16.0 * elements * size,)
        norm, norms, plus = self.norm_passes(spec, elements, size), 4 if spec.post_norms else 2, 3.0 * elements * size
        return norm[0] * norms + (plus, plus), norm[1] * norms + (plus, plus)

    def norm_passes(self, spec: ModelSpec, elements: float, size: int, width: int = 0) -> tuple[Passes, Passes]:
        """Returns the passes of a norm: one kernel; backward has another for the gradient of its weight. `width`:
        elements of a row."""
        slow = NORM * max(1.0, SHORT_ROW / (width or spec.hidden))
        return (2.0 * elements * size * slow,), (3.0 * elements * size * slow, elements * size)

    def rope_passes(self, rotated: float, size: int) -> Passes:
        """Returns the passes of rotating queries and keys: x1 cos - x2 sin, x2 cos + x1 sin, side by side: four
        multiplications and two additions of halves, one copy."""
        if self.compiled:
            return (2.0 * rotated,)
        return tuple(part * rotated / 2 for part in (1.0, 1.0, 1.5, 1.0, 1.0, 1.5, 2.0) for _ in range(2))

    def activation_passes(self, spec: ModelSpec, elements: float, size: int) -> tuple[Passes, Passes]:
        """Returns the passes of the activation of a feed-forward layer, gated or not."""
        one, is_one = elements * size, self.fused_activation or self.compiled
        bias = (2.0 * one,) if spec.mlp_bias and not is_one else ()
        if not spec.gated:
            return (*bias, 2.0 * one), (3.0 * one,)
        if is_one:
            return (3.0 * one,), (5.0 * one,)
        return (2.0 * one, 3.0 * one), (3.0 * one, 3.0 * one, 3.0 * one)

    def cast_passes(self, parts: tuple[tuple[Matmul, ...], ...], shape: RankShape) -> tuple[Passes, Passes, Passes]:
        """Returns the passes that fp8 adds to forward, gradients of inputs and gradients of weights: both factors of
        each matmul are quantized: their largest element is found, they are scaled and cast. Our compiled blocks
        quantize what several matmuls read once; elsewhere each matmul quantizes its own. Frozen weights were quantized
        before. `parts`: matmuls of attention and of the rest, of which all but the last read the same input."""
        if not shape.eight_bit:
            return (), (), ()
        wide = [p for part in parts for p in part if p.in_eight]
        x = [float(p.groups * p.m * p.k) for p in wide]
        w = [float(p.groups * p.k * p.n) for p in wide]
        g = [float(p.groups * p.m * p.n) for p in wide]
        if self.measured:
            readers = [[p for p in some if p.in_eight] for *several, last in parts for some in (several, [last])]
            read = [float(some[0].m * some[0].k) for some in readers if some]
            if shape.trains == "lora":  # nothing is transposed
                return tuple(QUANTIZE * one for one in read), tuple(QUANTIZE * one for one in g), ()
            each, again = LOOK + QUANTIZE, TRANSPOSE * QUANTIZE
            both = (*(QUANTIZE * one for one in read), *(each * one for one in w))
            transposed = tuple(again * a + (LOOK + again) * b for a, b in zip(g, w, strict=True))
            return both, transposed, tuple(again * one for one in read)
        if shape.trains == "lora":
            return tuple(EAGER_CAST * a for a in x), tuple(EAGER_CAST * a for a in g), ()
        pairs = ((x, w), (g, w), (g, x))
        forward, inputs, weights = (tuple(EAGER_CAST * (a + b) for a, b in zip(*pair, strict=True)) for pair in pairs)
        return forward, inputs, weights

    def weight_gradients(self, forward: tuple[Matmul, ...], shape: RankShape) -> RankWork:
        """Returns one matmul for each of forward's, added to what other micro-batches left as autograd does it. Frozen
        weights have none."""
        if shape.trains != "all":
            return RankWork()
        return RankWork(tuple(Matmul(p.n, p.k, p.m, p.groups, False, p.exact, p.small) for p in forward))

    def embedding_passes(self, x: float, table: int) -> tuple[Passes, Passes]:
        """Returns the passes beside the lookup of `x` bytes and its gradient, over a table of so many elements: forward
        and backward."""
        return (), (2.0 * table,)

    def padded_vocab(self, vocab: int, tp: int) -> int:
        """Returns the rows of the head that a tensor-parallel rank multiplies."""
        return -(-vocab // tp)

    def loss_passes(self, logits: int, size: int, tp: int) -> tuple[Passes, Passes]:
        """Returns the passes over logits that the matmul wrote: widened to fp32, softmax, loss. Backward: the softmax's
        gradient, cast to the logits' format."""
        if self.fused_loss:
            passes = (logits * 2.0 * size,) * LOSS_PASSES
            return passes[:1], passes[1:]
        if self.compiled:
            return (logits * (size + 4.0),), (logits * (4.0 + size),)
        if tp > 1:
            return sharded_loss(logits, size)
        forward = tuple(logits * b for b in (CAST * (size + 4.0), PLAIN_SOFTMAX * 8.0))
        return forward, tuple(logits * b for b in (4.0, 12.0, CAST * (4.0 + size)))

    # What is computed again, what travels, what waits -----------------------------------------------------------------

    def repeated(self, work: Training, again: bool, selective: bool) -> RankWork:
        """Returns the operations of forward that backward runs once more. `again`: the whole layer; `selective`: all
        but matmuls and attention."""
        if not again:
            return work.cheap if selective else RankWork()
        if not self.stops_early:
            return work.forward
        # Attention by definition has its matmuls behind the layer's own, which end with the one that nobody needs.
        matmuls = work.forward.matmuls
        last = max(index for index, p in enumerate(matmuls) if not p.exact)
        return replace(work.forward, matmuls=matmuls[:last] + matmuls[last + 1 :])

    def tensor_seconds(
        self, forward: float, again: float, matmuls: float, weights: float, sequence: bool
    ) -> tuple[float, float]:
        """Returns the exposed seconds of a layer's tensor-parallel collectives, forward and backward. `forward`: of one
        pass; `again`: of what is computed again; `matmuls`, `weights`: seconds of forward's matmuls and of those for
        weight gradients, which others hide some of it behind."""
        return forward, forward + again

    def traffic(self, plan: Plan, compute_bytes: int, weight_bytes: int) -> StateTraffic:
        """Returns the bytes of weights and gradients between ranks. On a CPU, gloo's threads and those that compute
        have the same cores: nothing is hidden."""
        hides = plan.device != "cpu"
        reduced = weight_bytes if plan.reduce_dtype == "auto" else FORMAT_BYTES[plan.reduce_dtype]
        return StateTraffic(reduced, compute_bytes, hides, hides)

    def update_bytes(self, update: float, elements: float) -> float:
        """Returns the bytes of an optimizer's pass over `elements` parameters, given those of the fused one."""
        return update

    def stage_bytes(self, size: float, tp: int, sequence: bool) -> float:
        """Returns the bytes that a rank sends to the next stage of `size` bytes of activations."""
        return size

    # Memory ---------------------------------------------------------------------------------------------------------

    def rank_states(self, share: RankShare, groups: Groups, plan: Plan, optimizer: str) -> RankStates | None:
        """Returns the states of a framework that keeps them in other formats than ours; None: as states.py has them."""
        return None

    def more_kept(self, spec: ModelSpec, seq_len: int, token_parts: int) -> int:
        """Returns the elements per token that a layer keeps for backward beside what is counted for ours."""
        return 0

    def selected(
        self, spec: ModelSpec, ffn: int, seq_len: int, token_parts: int, whole: Callable[[], int]
    ) -> int | None:
        """Returns the elements per token that selective recomputation keeps of a layer that keeps `whole()` without;
        None: as ours does."""
        return None

    def loss_bytes(self, num_tokens: int, vocab: int, is_cut: bool) -> int | None:
        """Returns the bytes while the loss is computed, where all logits are there at once; None: in chunks, as ours.
        `is_cut`: a rank has a part of the vocabulary."""
        return None

    def reserved(self, parts: dict[str, int], spec: ModelSpec, plan: Plan, size: int) -> dict[str, int]:
        """Returns the bytes of a rank by part, as they are reported. Ours reports what tensors hold. `size`: bytes of
        an element."""
        return parts


def sharded_loss(logits: int, size: int) -> tuple[Passes, Passes]:
    """Returns the passes of the loss when ranks have parts of the vocabulary: the largest, the difference, exp, its sum
    and the division are passes of their own, in fp32."""
    forward = tuple(logits * b for b in (CAST * (size + 4.0), 4.0, 8.0, 8.0, 4.0, 8.0))
    return forward, tuple(logits * b for b in (8.0, CAST * (4.0 + size)))


OURS = Stack()
