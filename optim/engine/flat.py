"""Parameters and gradients of a model as two flat vectors; the model's tensors lie in them.

Only those that are trained: a parameter that does not require a gradient when the space is made is left where it is.
Which lies where is in places.py.

The flat vectors are float64 when the parameters are, else float32. A bfloat16 or float16 parameter cannot lie in them:
it keeps its own memory, its part of p_N is its master, and after each step it is the master rounded. The master counts
where that is what the parameter holds, bit for bit; elsewhere somebody has written the parameter, and what was written
counts. That is found by address and version, and where `.data` leaves no trace in these by looking at values.

A parameter in whose memory something else lies keeps that memory, so that who looks at it sees what the parameter
becomes: another process, a buffer, a frozen layer that is tied by its memory, a NumPy array, another model. So does a
shard of a DTensor that FSDP pads (local.py).

What lies in a flat vector has a storage of its own there (lying.alone): so what saves tensors writes that tensor and no
other, and what replaces or moves its storage leaves the flat vector as it is. Whether it still lies there is found at
each step by its address, beside that of views that nobody else has.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import eq
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from thinwire.optim.engine.box import Box
from thinwire.optim.engine.local import as_dtensor, local, local_gradient, mark
from thinwire.optim.engine.lying import DTYPE, GRAD, SHAPE, VERSION, Lying, alone, are, holders
from thinwire.optim.engine.masters import Answer, bits, few, where_true
from thinwire.optim.engine.parameters import LOW_PRECISION, compute_dtype, refuse_unfit_gradient
from thinwire.optim.engine.places import places

logger = logging.getLogger(__name__)
Keeps = Callable[[int, Tensor], bool]
"""Is the gradient of this tensor, what is here of it, read where it lies?"""

LOOK_AT_ALL = 100
"""Steps from one look at all low-precision parameters to the next."""
THROUGH_DATA = (
    "bfloat16 or float16 parameters are written through `.data`, which leaves no trace, and a step has not seen it. "
    "From here on every step compares all of them with their float32 masters. Write them under torch.no_grad() without "
    "`.data` (p.clamp_(...), p.copy_(...)), or call optimizer.refresh_master() after it"
)


class FlatSpace:
    """Flat parameters p_N and gradients g_N of parameter groups. Dead elements are zero and stay so.

    Modifies the parameters: `param.data` and `param.grad` lie in the flat vectors from here on, but for those in low
    precision or shared memory, and for shards. Raises: ValueError, naming the parameter, before anything is modified.
    box: the ranks that hold the other shards; None where this rank has whole tensors.
    """

    def __init__(self, param_groups: list[dict[str, Any]]) -> None:
        dtype = compute_dtype(param_groups)
        placed = places(param_groups)
        self.tensors, self.spans, self.layout = placed.tensors, placed.spans, placed.layout
        self.p_N = torch.zeros(self.layout.numel, dtype=dtype, device=self.tensors[0].param.device)
        self.g_N = torch.zeros_like(self.p_N)
        self.box = Box.of([tensor.param for tensor in self.tensors])
        self._parameters, self._gradients = self.views(self.p_N), self.views(self.g_N)
        self._shown = [alone(view) for view in self._gradients]
        self._given = [as_dtensor(x, tensor.param) for x, tensor in zip(self._shown, self.tensors, strict=True)]
        """What p.grad is set to: the gradient shown, of a shard as a DTensor."""
        self.copies: dict[int, Tensor] = {}
        """What p.grad is set to of small shards that hooks have taken into g_N (sent.py)."""
        self._untouched = [-1] * len(self.tensors)
        """Version of the gradient shown when it was set to zero; -1, which none has, where it is not."""
        self._taken = [-1] * len(self.tensors)
        """Version of the gradient shown when it was taken last."""
        self._left: dict[int, tuple[int, int]] = {}  # of gradients left where they were: the id, and the version
        self.quiet: list[int] = []
        """Which tensors had got no gradient when gather_gradients was called last, since they were taken before."""
        self._low = [i for i, tensor in enumerate(self.tensors) if tensor.param.dtype in LOW_PRECISION]
        self._in_place: set[int] = set()
        """Those in memory that something else lies in."""
        self.params: list[Tensor] = [tensor.param for tensor in self.tensors]  # refuse_orphans() counts who holds them
        self._dtypes = list(map(DTYPE, self.params))
        self._lying, self._gradients_lie = Lying(self._parameters), Lying(self._gradients)
        """Of each tensor, what its parameter must be like, and where it and its gradient lie in the flat vectors."""
        self._written: dict[int, tuple[int, int]] = {}
        self._looks, self._looks_at_all = 0, False
        self._sampled = [self._few_masters(dtype) for dtype in LOW_PRECISION]
        self._samples: tuple[list[int], list[list[Tensor]]] = [], [[] for _ in LOW_PRECISION]
        """Where low-precision parameters lie, and of each type a few elements of each: views."""
        self._unlike: Answer | None = None
        """Did look_at_values find other values than the rounded masters?"""
        self.gradient_norm: Tensor | None = None
        """What shorten_gradient last found, 0-dim, before it shortened; None before."""
        self.shortened_by: Tensor | None = None
        """The factor that it used, 0-dim."""
        self.quiet = self.take_gradients(range(len(self.tensors)), is_zero=True)
        self.take_changes()

    def views(self, vector_N: Tensor) -> list[Tensor]:
        """The part of a flat vector that belongs to each of `tensors`, in the parameter's shape."""
        return [vector_N[tensor.start : tensor.stop].view(tensor.shape) for tensor in self.tensors]

    def _here(self, indices: Iterable[int] | None = None) -> list[Tensor]:
        """What is here of each parameter, or of these."""
        chosen = self.params if indices is None else [self.params[i] for i in indices]
        return list(map(local, chosen)) if self.box else chosen

    def spread(self, values: Sequence[float]) -> Tensor:
        """The value of its parameter group at each element: float[N], 0 where none is."""
        out_N = torch.zeros_like(self.p_N)
        for value, span in zip(values, self.spans, strict=True):
            out_N[span] = value
        return out_N

    @property
    def cuts(self) -> list[int]:
        """Where one parameter group ends and another begins."""
        return sorted(span.start for span in self.spans)[1:]

    @property
    def first(self) -> slice:
        """An element that is live; none where there is none."""
        return next((slice(start, start + 1) for start, stop in self.layout.live if start < stop), slice(0))

    @property
    def master_bytes(self) -> int:
        """Of p_N, what is beside the memory of low-precision parameters and of shards that stay where they are."""
        return sum(self._parameters[i].nbytes for i in {*self._low, *(self._in_place if self.box else ())})

    def take_changes(self) -> None:
        """p <- parameters that were changed from outside: other memory, or a low-precision tensor written in place.

        Of a low-precision parameter only elements that are no longer the rounded master are taken, so that weights
        which are swapped out and back leave the master as it was. What is written through `.data` is for
        take_written(), and seen by look_at_values(). Does not wait for the device.
        Raises: ValueError for another dtype, shape or device; then nothing is taken.
        """
        self.take_moved()
        if self._low:
            self._take_low()

    @torch.no_grad()
    def _take_low(self) -> None:
        for index, here in zip(self._low, self._here(self._low), strict=True):
            view, now = self._parameters[index], mark(self.tensors[index].param)
            if self._written.get(index) != now:
                view.copy_(where_true(view, here))
                self._written[index] = now

    def take_moved(self) -> None:
        """take_changes(), of those that are not in low precision: they lie in p_N again, unless they stay in place."""
        here = self._here()
        if not self._lying.all_hold(here):  # what is there is on their device
            self._take_moved(here)

    @torch.no_grad()
    def _take_moved(self, here: list[Tensor]) -> None:
        self._refuse_changed(here)
        low = set(self._low)
        apart = [i for i, x in enumerate(here) if i not in low and not self._lying.holds(i, x)]
        if not apart:
            return
        # What lies in p_N in another place or way, as turned there or changed with another, is read while that is
        # written: from a copy. Who else looks there sees what comes there.
        first, end = self.p_N.data_ptr(), self.p_N.data_ptr() + self.p_N.nbytes
        inside = {i for i in apart if first <= here[i].data_ptr() < end}
        stays = set() if self.box else self._held_elsewhere([i for i in apart if i not in inside])
        values = [here[i].clone() if i in inside else here[i] for i in apart]
        torch._foreach_copy_([self._parameters[i] for i in apart], values)
        for index in apart:
            if self.box:
                lies = self.box.lay_in(alone(self._parameters[index]), self.tensors[index].param)
                stays |= set() if lies else {index}
            elif index not in stays:
                self.tensors[index].param.data = alone(self._parameters[index])
        fresh, self._in_place = set() if self.box else stays - self._in_place, stays
        if fresh:
            logger.warning(
                "memory_shared parameters=%d first=%r: other tensors or arrays lie in their memory, such as a buffer, "
                "a state_dict() that is kept, a loss with its graph, a NumPy view or a tied layer. They see every step "
                "as under torch.optim; it costs a copy of these parameters, and memory as much again. Let go of what "
                "is not needed (del state_dict), and the next step moves them",
                len(fresh),
                self.tensors[min(fresh)].label,
            )

    def _held_elsewhere(self, indices: Sequence[int]) -> set[int]:
        """Which of these lie in memory that is not theirs alone: by who holds their storage, so that views count."""
        storages = [tensor.param.untyped_storage() for tensor in self.tensors]
        ours = Counter(storage.data_ptr() for storage in storages)
        found = set()
        for index in indices:
            storage, param = storages[index], self.tensors[index].param
            elsewhere = holders(storage) > ours[storage.data_ptr()]
            if elsewhere or (param.device.type == "cpu" and param.is_shared()):  # type: ignore[no-untyped-call]
                found.add(index)
        return found

    def look_at_values(self) -> None:
        """See whether low-precision parameters are still their rounded masters: take_unlike() takes those that are not.

        For what is written through `.data`. A few elements of each are looked at; all of them are, and are taken, at
        the first calls, at every LOOK_AT_ALLth, and at every call once that has found what a look at a few had not.
        Does not wait for the device.
        """
        if not self._low:
            return
        self.take_unlike(late=True)
        if self._looks_at_all:
            self.take_written()
            return
        self._looks += 1
        whole = self._looks & (self._looks - 1) == 0 or self._looks % LOOK_AT_ALL == 0
        found = self._unlike_few()
        if whole:
            found = self._unlike_all() & ~found
            self.take_written()
        self._unlike = Answer(found, whole)
        if self.p_N.device.type == "cpu":
            self.take_unlike()

    def take_unlike(self, *, late: bool = False) -> None:
        """p <- what was written through `.data`, where look_at_values() has found that. Does not wait for the device.

        To be called when the device has been waited for since. late: the parameters have been stepped since, so that
        the write is lost: from here on all values are looked at in every step, and it is said.
        """
        answer = self._unlike
        found = None if answer is None else answer.there()
        if answer is None or found is None:
            return
        self._unlike = None
        if found and (late or answer.of_all):
            self._looks_at_all = True
            logger.warning("written_through_data: %s", THROUGH_DATA)
        elif found:
            self.take_written()

    def _unlike_few(self) -> Tensor:
        params = [here.detach() for here in self._here(self._low) if here.numel()]
        where = [param.data_ptr() for param in params]
        if self._samples[0] != where:
            self._samples = where, [[few(x) for x in params if x.dtype == dtype] for dtype in LOW_PRECISION]
        found = torch.zeros((), dtype=torch.bool, device=self.p_N.device)
        for at_K, sample in zip(self._sampled, self._samples[1], strict=True):
            if sample:
                few_K = torch.cat(sample)
                found |= (bits(self.p_N[at_K].to(few_K.dtype)) != bits(few_K)).any()
        return found

    def _few_masters(self, dtype: torch.dtype) -> Tensor:
        """Where in p_N the masters of a few elements of the parameters of this type lie."""
        lowest = [self._parameters[i] for i in self._low if self._dtypes[i] == dtype]
        views = [few(view) for view in lowest if view.numel()]
        at = [x.storage_offset() + k * x.stride(0) for x in views for k in range(len(x))]
        return torch.tensor(at, dtype=torch.int64, device=self.p_N.device)

    def _unlike_all(self) -> Tensor:
        found = torch.zeros((), dtype=torch.bool, device=self.p_N.device)
        for i, here in zip(self._low, self._here(self._low), strict=True):
            found |= (bits(self._parameters[i].to(here.dtype)) != bits(here.detach())).any()
        return found

    def refuse_unlike(self, why: str) -> None:
        """Raises: RuntimeError for a low-precision parameter that is not its rounded master; why: as refuse_written.

        Looks at all values, and waits for the device.
        """
        for i, here in zip(self._low, self._here(self._low), strict=True):
            if not torch.equal(bits(self._parameters[i].to(here.dtype)), bits(here.detach())):
                raise RuntimeError(f"{self.tensors[i].label}: was written after {why}")

    def refuse_changed(self) -> None:
        """Raises: ValueError for a parameter that has another dtype, shape or device than when the space was made."""
        here = self._here()
        if not self._lying.all_hold(here):  # what lies there is on their device
            self._refuse_changed(here)

    def _refuse_changed(self, here: list[Tensor]) -> None:
        alike = list(map(SHAPE, here)) == self._lying.shapes and list(map(DTYPE, here)) == self._dtypes
        if alike and all(param.device == self.p_N.device for param in here):
            return
        for tensor, param, dtype, view in zip(self.tensors, here, self._dtypes, self._parameters, strict=True):
            if param.dtype != dtype or param.device != self.p_N.device or param.shape != view.shape:
                raise ValueError(
                    f"{tensor.label}: was {dtype} on {self.p_N.device} when the optimizer was made, and is now "
                    f"{param.dtype} {tuple(param.shape)} on {param.device}; move and convert the model first, then "
                    "make the optimizer"
                )

    def marks(self) -> list[tuple[int, int]]:
        """Of each parameter what changes when it is written or gets other memory: where it lies, and its version."""
        return self._marks_of(self.params)

    def _marks_of(self, tensors: Sequence[Tensor | None]) -> list[tuple[int, int]]:
        if self.box is None and NoneType not in map(type, tensors):
            return list(zip(map(Tensor.data_ptr, tensors), map(VERSION, tensors), strict=True))  # type: ignore[arg-type]
        return [(0, 0) if one is None else mark(one) for one in tensors]

    def refuse_written(self, marks: Sequence[tuple[int, int]], why: str) -> None:
        """Raises: RuntimeError for a parameter with other values since marks() gave these; why: what is wrong with it.

        One in memory of its own with the same values is fine. What is written through `param.data` cannot be seen.
        """
        self.refuse_changed()
        if self.marks() == marks:
            return
        for tensor, here, view, before in zip(self.tensors, self._here(), self._parameters, marks, strict=True):
            apart = here.data_ptr() != view.data_ptr()
            if mark(tensor.param) != before and not (apart and torch.equal(here, view.to(here.dtype))):
                raise RuntimeError(f"{tensor.label}: was written after {why}")

    def take_written(self) -> None:
        """take_changes(), which looks at all values of low-precision parameters: at what `.data` has written too."""
        self._written.clear()
        self.take_changes()

    def equalise_copies(self) -> None:
        """p <- that of one rank, of tensors that several ranks of the box have alike. Collective in the box."""
        if self.box is not None:
            self.box.equalise_(self._parameters)

    def write_back(self) -> None:
        """Parameters with memory of their own <- their part of p_N, rounded to theirs. Does not wait for the device."""
        if self._in_place or self._low:
            self._write_back()

    @torch.no_grad()
    def _write_back(self) -> None:
        if self._in_place:
            torch._foreach_copy_(self._here(self._in_place), [self._parameters[i] for i in self._in_place])
        if self._low:
            torch._foreach_copy_(self._here(self._low), [self._parameters[i] for i in self._low])
            self._written = {i: mark(self.tensors[i].param) for i in self._low}

    @torch.no_grad()
    def masters(self) -> dict[Tensor, Tensor]:
        """The master of each low-precision parameter, float[elements]: what was written counts. New."""
        pairs = [(self.tensors[i].param, self._parameters[i]) for i in self._low]
        return {param: where_true(view, local(param)).reshape(-1) for param, view in pairs}

    @torch.no_grad()
    def load_masters(self, masters: Mapping[Tensor, Tensor]) -> None:
        """Masters of those that have one there <- these. Parameters stay: the next look takes what is not rounded."""
        for i in self._low:
            if (master := masters.get(self.tensors[i].param)) is not None:
                self._parameters[i].view(-1).copy_(master)
        self._written.clear()

    def is_low(self, index: int) -> bool:
        """Is the tensor in low precision, so that its gradient lies in memory of its own?"""
        return self._dtypes[index] in LOW_PRECISION

    def lies_flat(self, x: Tensor) -> bool:
        """Does it lie in g_N?"""
        return 0 <= x.data_ptr() - self.g_N.data_ptr() < self.g_N.nbytes

    def marks_of_gradients(self, indices: Iterable[int]) -> list[tuple[int, int]]:
        """Of each what changes when its memory is replaced or written, of a shard through its DTensor too."""
        params = self.params
        return self._marks_of([params[i].grad for i in indices])

    def release(self, index: int) -> None:
        """The tensor leaves: its memory is its own again, without a gradient. Its part of the flat vectors stays."""
        param, here = self.tensors[index].param, local(self.tensors[index].param)
        if index not in self._low and here.data_ptr() == self._parameters[index].data_ptr():
            if self.box is not None:
                self.box.lay_in(here.detach().clone(), param)
            elif not self._held_elsewhere([index]):
                param.data = param.detach().clone()
        param.grad = None

    def gather_gradients(self, done: Sequence[bool] = (), keeps: Keeps | None = None) -> None:
        """Bring every gradient into g_N: a foreign tensor is copied in, a missing one counts as zero.

        done: which tensors' are there already, or are read elsewhere, and are left; none by default. keeps: as in
        take_gradients. Raises: ValueError, naming the parameter; then nothing is modified.
        """
        every = range(len(self.tensors))
        self.quiet = self.take_gradients([i for i in every if not done[i]] if any(done) else every, keeps)

    def take_gradients(self, indices: Sequence[int], keeps: Keeps | None = None, *, is_zero: bool = False) -> list[int]:
        """As gather_gradients, of these tensors. Returns those without a new one. Raises: ValueError, naming one.

        keeps: is this one read, and left, where backward made it? is_zero: is g_N? Collective where local_gradient is.
        """
        if torch.is_grad_enabled():  # seldom, and a decorator would take 4 us of each bucket
            with torch.no_grad():
                return self.take_gradients(indices, keeps, is_zero=is_zero)
        quiet, others = self._kept(indices)
        indices, missing, into, foreign = [], [], [], []
        for i, grad in self._fit(others, keeps, quiet):
            view = self._gradients[i]
            indices.append(i)
            if grad is None:
                missing.append(view)
                quiet.append(i)
                self._untouched[i] = self._version(i)
            elif grad.layout != torch.strided or not self._gradients_lie.holds(i, grad):
                into.append(view)
                dense = grad if grad.layout == torch.strided else grad.to_dense()
                foreign.append(dense.clone() if self.lies_flat(dense) else dense)  # the same memory, read otherwise
                self._untouched[i] = -1
            elif self.tensors[i].param.grad is self._given[i] and self._version(i) == self._taken[i]:
                quiet.append(i)
        if missing and not is_zero:
            torch._foreach_zero_(missing)
        if foreign:
            torch._foreach_copy_(into, foreign)
        self._show_gradients(indices)
        for i in indices:
            self._taken[i] = self._version(i)
        return quiet

    def _version(self, index: int) -> int:
        """Of the gradient shown: autograd adds to the DTensor where FSDP adds to what is in it."""
        given, shown = self._given[index], self._shown[index]
        return shown._version if given is shown else shown._version + given._version

    def _versions(self) -> list[int]:
        found: list[int] = list(map(VERSION, self._shown))
        return found if self.box is None else [self._version(i) for i in range(len(found))]

    def _fit(
        self, grads: Iterable[tuple[int, Tensor | None]], keeps: Keeps | None, quiet: list[int]
    ) -> list[tuple[int, Tensor | None]]:
        """What is here of these, but for those that are kept, of which quiet gets the old. Raises: ValueError."""
        found: list[tuple[int, Tensor | None]] = []
        tensors, shapes, dtypes, device = self.tensors, self._lying.shapes, self._dtypes, self.p_N.device
        for i, grad in grads:
            if grad is None:
                found.append((i, grad))
                continue
            here = grad if self.box is None else local_gradient(grad, tensors[i].param)
            if keeps is not None and keeps(i, here):
                now = id(grad), grad._version
                if self._left.get(i) == now:
                    quiet.append(i)
                self._left[i] = now
                continue
            if grad.shape != shapes[i] or grad.dtype != dtypes[i] or grad.device != device:
                if self.box is None and grad.shape != shapes[i]:
                    self.refuse_changed()
                refuse_unfit_gradient(grad, tensors[i].param, tensors[i].label)
            found.append((i, here))
        return found

    def _kept(self, indices: Sequence[int]) -> tuple[list[int], list[tuple[int, Tensor | None]]]:
        """Takes the gradients that lie where they were shown, as most do. Those without a new one; and the others."""
        params, given, taken = self.params, self._given, self._taken
        is_all = indices == range(len(params))
        grads: list[Tensor | None] = list(map(GRAD, params if is_all else [params[i] for i in indices]))
        if self.box is not None:
            return [], list(zip(indices, grads, strict=True))
        if is_all and are(grads, given) and self._gradients_lie.all_hold(given):
            self._taken = list(map(VERSION, given))
            return [i for i in indices if taken[i] == self._taken[i]] if any(map(eq, taken, self._taken)) else [], []
        quiet: list[int] = []
        others: list[tuple[int, Tensor | None]] = []
        for i, grad in zip(indices, grads, strict=True):
            own = given[i]
            if grad is not own or not self._gradients_lie.holds(i, own):
                others.append((i, grad))
                continue
            version = own._version
            if version == taken[i]:
                quiet.append(i)
            taken[i] = version
        return quiet, others

    @property
    def is_untouched(self) -> bool:
        """Has no parameter got a gradient since they were dropped or set to zero here?

        One that was set to zero by other means (`p.grad.zero_()`), or that a step took and left, counts as got.
        """
        for i, (tensor, given, known) in enumerate(zip(self.tensors, self._given, self._untouched, strict=True)):
            if (grad := tensor.param.grad) is not None and (grad is not given or self._version(i) != known):
                return False
        return True

    def shorten_gradient(self, max_norm: float | None) -> None:
        """g <- g, shortened to this 2-norm as torch.nn.utils.clip_grad_norm_ does it. Does not wait for the device."""
        if max_norm is not None:
            self.gradient_norm = self.norm(self.g_N)
            self.shorten_by_known_norm(max_norm)

    def shorten_by_known_norm(self, max_norm: float) -> None:
        """The same where its norm has been found."""
        assert self.gradient_norm is not None
        self.shortened_by = shortening(self.gradient_norm, max_norm)
        self.g_N.mul_(self.shortened_by)

    def norm(self, x_N: Tensor) -> Tensor:
        """||x||_2 of a vector of all elements, 0-dim: of whole tensors, where this rank has shards of them.

        Collective in the box then.
        """
        found: Tensor
        if self.box is None:
            found = torch.linalg.vector_norm(x_N)
        else:
            norms_T = torch.stack(list(torch._foreach_norm(self.views(x_N))))
            found = self.box.total(norms_T.square_()).sqrt_()
        return found

    @torch.no_grad()
    def leave_gradients(self, g_N: Tensor) -> None:
        """Gradients <- these, of low-precision parameters too. For who reads them after a step."""
        if g_N is not self.g_N:
            self.g_N.copy_(g_N)
        for i in self._low:
            param, view = self.tensors[i].param, self._gradients[i]
            if param.grad is None:
                param.grad = torch.empty_like(param)
            local(param.grad).copy_(view)

    def clear_dead(self) -> None:
        """g <- 0 where dead: a rank that takes no part in a mean sends NaN there too, and nothing else clears it."""
        dead = torch.tensor(self.layout.dead(0, self.layout.numel), dtype=torch.int64, device=self.g_N.device)
        self.g_N.index_fill_(0, dead, 0.0)

    def drop_gradients(self) -> None:
        """Gradients <- None: what backward makes next is read in place, or copied once, in place of a zero and an add.

        g_N keeps what it held, until take_gradients or gather_gradients have brought the next ones.
        """
        for param in self.params:
            param.grad = None

    def zero_gradients(self, set_to_none: bool = True) -> None:
        """g_N <- 0, and gradients are views of it again. Those in low precision become None, or zero.

        Raises: ValueError for a parameter of another shape; then nothing is modified.
        """
        if self.box is None and list(map(SHAPE, self.params)) != self._lying.shapes:
            self.refuse_changed()
        self.g_N.zero_()
        for i in self._low:
            param = self.tensors[i].param
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.detach_().zero_()
        if not (are(list(map(GRAD, self.params)), self._given) and self._gradients_lie.all_hold(self._shown)):
            self._show_gradients(range(len(self.tensors)))
        self._untouched = self._versions()

    def _show_gradients(self, indices: Sequence[int]) -> None:
        """Backward adds into the flat gradient, where the parameter has its dtype."""
        for i in indices:
            param, view = self.tensors[i].param, self._gradients[i]
            if param.grad is self._given[i] and self._gradients_lie.holds(i, self._shown[i]):
                continue
            if param.dtype == view.dtype:
                if self.box is None and param.shape != view.shape:
                    self.refuse_changed()
                if not self._gradients_lie.holds(
                    i, self._shown[i]
                ):  # somebody replaced its storage, as model.to() does
                    self._shown[i] = alone(view)
                    self._given[i] = as_dtensor(self._shown[i], param)
                param.grad = self._given[i]


def shortening(norm: Tensor, max_norm: float) -> Tensor:
    """The factor that brings a vector of this norm, 0-dim, to max_norm at most, as torch.nn.utils.clip_grad_norm_."""
    # NaN would reach the dead elements, which nothing clears
    return (max_norm / (norm + 1e-6)).clamp_(max=1.0).nan_to_num_(1.0)
