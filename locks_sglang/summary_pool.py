"""The summary pool: one packed summary per (layer, physical 16-token page, KV head), beside SGLang's KV pool.

It never owns a page. A page is `slot // 16`; whoever owns the slots (a radix node, a running request) owns the records.
That is why a prefix hit, a node split, a freed duplicate or an eviction needs no work here.
"""

from collections.abc import Iterable

import torch

from .audit import Audit
from .config import LocksConfig
from .counters import Counters
from .kernels.build_page_summaries import (
    PageFactors,
    PageSummaries,
    RecordLayout,
    build,
    build_page_summaries,
    layer_offsets,
    pack,
    page_factors,
    unpack,
)
from .kernels.common import PAGE_SIZE, token_slots
from .kernels.common.capability import runs_kernels
from .kernels.decode_plan import PageFlags

POOL_ATTRIBUTE = "_locks_summary_pool"

CENTER_OUTLIER = 1e3
"""A page whose largest key is this many times the median page's is broken, not spread: layers with constant outlier channels
have them on every page."""

VERIFY_SLACK = 0.02
"""Most that a stored record may describe its page worse than a fresh one: keys as a share of the page's own spread, the value
mean of its own length. On a GPU the order of additions in a rebuild is not fixed, so a value at the edge of a quantisation step
may round to the other side, and nearly equal singular values may swap; a record of other keys is off by the order of 1."""


class SummaryPool:
    """Summaries of every page of a KV pool, all layers of this rank.

    Args:
        kv_pool: SGLang's `MHATokenToKVPool` (token-major buffers [slots, H, D]).
        config: settings.

    Attributes:
        record: uint8 [L, N, H, record_bytes]; N counts the padding page 0. values: int8 [L, N, H, Dv], the value means that go
            with it, if the layout has them.
        valid: bool [L, N]. Cleared by the step that writes a page's first token, set by the build. Freed pages keep their
            flag: they are nobody's, and the next owner's first write clears it.
        center: fp32 [L, H, D], mean key of the first pages that the layer built; fixed from then on.
        builds, reuses: int32 [N]: builds of the page that steps planned since its first token was written, and requests that
            started with the page in their cached prefix since then.
        kv_bytes_per_page: bytes of the keys and values of one page, all layers and heads.
        counters: what the backends on this pool did.
        flags: `valid`, `builds`, `reuses` and the counter of invalid pages, as a decode step's plan takes them.
        last_audit: what the last audit found; None before there was one.
    """

    def __init__(self, kv_pool: object, config: LocksConfig) -> None:
        self.kv_pool = kv_pool
        self.config = config
        self.first_layer = int(kv_pool.start_layer)  # type: ignore[attr-defined]
        self.num_layers = int(kv_pool.layer_num)  # type: ignore[attr-defined]
        keys, values = self._buffers(self.first_layer)
        heads, dim = keys.shape[1:]
        self.layout = RecordLayout(dim, values.shape[2], config.rank, config.value_mean)
        self.num_pages = keys.shape[0] // PAGE_SIZE
        self.kv_bytes_per_page = PAGE_SIZE * self.num_layers * (keys[0].nbytes + values[0].nbytes)
        device = keys.device
        self.record, self.values = self.layout.empty(self.num_layers, self.num_pages, heads, device=device)
        self.valid = torch.zeros(self.num_layers, self.num_pages, dtype=torch.bool, device=device)
        self.center = torch.zeros(self.num_layers, heads, dim, device=device)
        self.builds = torch.zeros(self.num_pages, dtype=torch.int32, device=device)
        self.reuses = torch.zeros_like(self.builds)
        invalid = torch.zeros(1, dtype=torch.int64, device=device)
        self.counters = Counters(invalid_pages=invalid)
        self.flags = PageFlags(self.valid, self.builds, self.reuses, invalid)
        self._centred = [False] * self.num_layers
        self.last_audit: Audit | None = None
        self._dirty: set[int] = set()
        self._late: list[torch.Tensor] = []
        self._layers = [
            PageSummaries(self.layout, self.valid[i], self.center[i], self.record[i], self._values_of(i))
            for i in range(self.num_layers)
        ]
        # Where every layer's keys and values lie, for kernels; the pool keeps its buffers as long as it lives, as the graphs
        # that read them need it to.
        on_kernels = runs_kernels(keys, dim, values.shape[2], 1)
        self._offsets = layer_offsets([self._buffers(layer_id) for layer_id in self.layer_ids]) if on_kernels else None

    @classmethod
    def attached(cls, kv_pool: object) -> "SummaryPool | None":
        """The summary pool of a KV pool, if it has one."""
        return getattr(kv_pool, POOL_ATTRIBUTE, None)

    @classmethod
    def attach(cls, kv_pool: object, config: LocksConfig) -> "SummaryPool":
        """Get or make the summary pool of a KV pool: several backend instances share one."""
        pool = cls.attached(kv_pool)
        if pool is None:
            pool = cls(kv_pool, config)
            setattr(kv_pool, POOL_ATTRIBUTE, pool)
        return pool

    def _buffers(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [slots, H, D] and values [slots, H, Dv]; waits for a HiCache load of this layer that is under way."""
        pool = self.kv_pool
        return pool.get_key_buffer(layer_id), pool.get_value_buffer(layer_id)  # type: ignore[attr-defined]

    @property
    def layer_ids(self) -> range:
        """Model layers that this rank holds."""
        return range(self.first_layer, self.first_layer + self.num_layers)

    def _values_of(self, index: int) -> torch.Tensor | None:
        return None if self.values is None else self.values[index]

    @property
    def bytes_per_page(self) -> int:
        """Bytes of the summaries of one page, all layers and heads."""
        return self.num_layers * self._layers[0].bytes_per_page

    @property
    def nbytes(self) -> int:
        """Bytes of the summaries of all pages."""
        return self.num_pages * self.bytes_per_page

    def layer(self, layer_id: int) -> PageSummaries:
        """Summaries of one model layer (views, no copy)."""
        return self._layers[layer_id - self.first_layer]

    def first_write(self, pages: torch.Tensor) -> None:
        """Physical pages int64 [n] whose first token this step writes: what they held describes nothing any more."""
        self.valid[:, pages] = False
        self.builds[pages] = 0
        self.reuses[pages] = 0

    def count_reuse(self, pages: torch.Tensor) -> None:
        """A request starts with these physical pages int64 [n] in its cached prefix; a page may appear more than once."""
        self.reuses.index_add_(0, pages, torch.ones_like(pages, dtype=torch.int32))

    def count_builds(self, pages: torch.Tensor) -> None:
        """These physical pages int64 [n], all different, are going to be built: see `builds`."""
        self.builds[pages] += 1

    @property
    def centred(self) -> bool:
        """Whether every layer has its centre."""
        return all(self._centred)

    def build(self, layer_id: int, pages: torch.Tensor) -> None:
        """Summarise complete physical pages int64 [n] of one layer, -1 for none, from the keys in the KV pool.

        Keys are read back from the pool, not taken from the layer's arguments: rotary embedding and storing may be fused
        upstream, and an fp8 pool rounds what it stores. On kernels it can be part of a CUDA graph.
        """
        index = layer_id - self.first_layer
        keys, values = self._buffers(layer_id)
        if self._offsets is not None:
            s = self._layers[index]
            assert s.record is not None
            build(keys, values, pages, s.center, s.record, s.values, s.valid, self.layout)
            return
        pages = pages[pages >= 0]
        if pages.numel() == 0:
            return
        slots = token_slots(pages, PAGE_SIZE)
        factors = page_factors(keys[slots], values[slots], self.layout.rank, self.center[index])
        self.record[index, pages], means = pack(factors, self.layout)
        if means is not None and self.values is not None:
            self.values[index, pages] = means
        self.valid[index, pages] = True

    def build_all(self, pages: torch.Tensor) -> None:
        """`build` in every layer, on kernels in one launch."""
        if self._offsets is None:
            for layer_id in self.layer_ids:
                self.build(layer_id, pages)
            return
        keys, values = self._buffers(self.first_layer)
        build(keys, values, pages, self.center, self.record, self.values, self.valid, self.layout, self._offsets)

    def build_centred(self, layer_id: int, pages: torch.Tensor) -> None:
        """`build`, after fixing the layer's centre from these pages if it has none yet, which waits for the device."""
        index = layer_id - self.first_layer
        if not self._centred[index] and pages.numel():
            self._fix_center(index, self._buffers(layer_id)[0][token_slots(pages, PAGE_SIZE)].float())
        self.build(layer_id, pages)

    def build_late(self, filled: torch.Tensor) -> None:
        """Leave the pages int64 [n] that a decode step fills, -1 for none, to the next step's plan, and clear `filled`.

        For layers without a centre: a CUDA graph cannot fix one, and it cannot be fixed before the keys are there. Only a
        server whose prompts so far were all shorter than a page comes here. Until then the pages have no summary and are read.
        """
        self._late.append(filled.clone())
        filled.fill_(-1)

    def pending(self) -> set[int]:
        """Physical pages that `catch_up` is going to build. Waits for the device."""
        return self._dirty | {page for filled in self._late for page in filled.tolist() if page >= 0}

    def catch_up(self) -> None:
        """Build what earlier steps left, and rebuild what `mark_dirty` named. Runs before a step's plan, on its stream."""
        late, self._late = self._late, []
        for filled in late:
            self._build_layers(filled[filled >= 0])
        if self._dirty:
            pages = torch.tensor(sorted(self._dirty), dtype=torch.int64, device=self.valid.device)
            self._dirty.clear()
            self.valid[:, pages] = False
            self.count_builds(pages)
            self._build_layers(pages)
            self.counters.rebuilt += pages.numel()

    def _build_layers(self, pages: torch.Tensor) -> None:
        """`build_centred` in every layer."""
        for layer_id in self.layer_ids:
            self.build_centred(layer_id, pages)

    def _fix_center(self, index: int, k: torch.Tensor) -> None:
        """Fix the centre of a layer for good, from the ordinary ones among the first pages: k fp32 [n, P, H, D].

        A page with NaN, Inf or overflowing keys must not enter it: every later page would be stored relative to it. Where
        no page is usable nothing usable is stored either, and the next build tries again.
        """
        largest = k.abs().flatten(1).amax(1)
        finite = torch.isfinite(largest)
        if not bool(finite.any()):
            return
        ordinary = finite & (largest <= CENTER_OUTLIER * largest[finite].median())
        self.center[index] = k[ordinary].mean((0, 1))
        self._centred[index] = True

    def verify(
        self, pages: torch.Tensor, slack: float = VERIFY_SLACK, layer_ids: Iterable[int] | None = None
    ) -> list[tuple[int, int]]:
        """Compare stored records with fresh rebuilds from the KV pool.

        Args:
            pages: int64 [n], complete physical pages that somebody owns.
            slack: see `VERIFY_SLACK`; 0 asks for equality, bit for bit.
            layer_ids: of `layer_ids`; None for all.

        Returns:
            (layer id, page) of every page without a valid summary or whose record does not describe its keys and values.
            Waits for the device.
        """
        bad: list[tuple[int, int]] = []
        pages = pages.to(self.valid.device)
        for layer_id in self.layer_ids if layer_ids is None else layer_ids:
            index = layer_id - self.first_layer
            keys, values = self._buffers(layer_id)
            slots = token_slots(pages, PAGE_SIZE)
            k, v = keys[slots], values[slots]
            built = build_page_summaries(k, v, self.layout.rank, center=self.center[index], value_mean=self.layout.value_mean)
            assert built.record is not None
            fresh = built.record, built.values
            stored = self.record[index, pages], None if self.values is None else self.values[index, pages]
            pairs = [(ours, theirs) for ours, theirs in zip(fresh, stored, strict=True) if ours is not None]
            differs = torch.stack([(ours != theirs).any(-1) for ours, theirs in pairs]).any(0)
            wrong = ~self.valid[index, pages]
            if slack == 0.0:
                wrong |= differs.any(-1)
            for head in differs.any(0).nonzero().flatten().tolist() if slack else ():
                # A page without spread or values has no measure; where its record is the fresh one it needs none.
                kept, best = (
                    self._misfit(
                        k[:, :, head],
                        v[:, :, head],
                        unpack(record[:, head], None if means is None else means[:, head], self.layout),
                        self.center[index, head],
                    )
                    for record, means in (stored, fresh)
                )
                wrong |= differs[:, head] & ~(kept <= best + slack).all(0)
            bad += [(layer_id, int(page)) for page in pages[wrong]]
        return bad

    @staticmethod
    def _misfit(k: torch.Tensor, v: torch.Tensor, factors: PageFactors, center: torch.Tensor) -> torch.Tensor:
        """How far factors are from keys [n, P, D] and from the mean of v [n, P, Dv]: [1 or 2, n], in `VERIFY_SLACK`'s units."""
        keys, values = k.float(), v.float().mean(1)
        described = (factors.mean + center).unsqueeze(1) + factors.coef @ factors.basis.transpose(-1, -2)
        spread, least = keys - keys.mean(1, keepdim=True), torch.finfo(torch.float32).tiny
        misfit = [(keys - described).flatten(1).norm(dim=1) / spread.flatten(1).norm(dim=1).clamp_min(least)]
        if factors.value_mean is not None:
            misfit.append((values - factors.value_mean).norm(dim=1) / values.norm(dim=1).clamp_min(least))
        return torch.stack(misfit)

    def mark_dirty(self, slots: torch.Tensor) -> None:
        """KV of these token slots int [n] arrived without a forward pass; called on the scheduler's thread.

        Only a host-side set is touched here: the device flags belong to the forward stream, which `catch_up` runs on.
        """
        self._dirty.update((slots.reshape(-1) // PAGE_SIZE).unique().tolist())
