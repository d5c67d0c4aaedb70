"""What the ops of all families share: picking, declining, binding.

The hot path of an op is one dictionary look-up and one compiled call. What the arguments must look
like is checked by the compiled function, before any CUDA call and at no cost to Python: dtypes,
ranks, equal extents by the module's own checks, ranges by what the kernel's host side adds
(``kernels/ranges.py``). Only when that refuses or fails does an op work out in Python why.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from inspect import signature
from operator import index
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from specplan import library
from specplan.errors import LaunchError, SpecplanError, UncertifiedCell
from specplan.forked import watched
from specplan.plans.families import FAMILIES as PLANNING
from specplan.plans.manifest import PlanRecord
from specplan.uncertified import Reason, Uncertified

if TYPE_CHECKING:
    from specplan.pack import Pack, Picked

#: What a compiled function raises for arguments that it does not take, always before it launches.
ARGUMENT_ERRORS = (TypeError, ValueError, OverflowError)
#: What reading the shape of something that is not the tensor that an op wants raises.
SHAPE_ERRORS = (AttributeError, IndexError, TypeError, ValueError)
#: What a hot path stumbles over: a first call of its kind, a refusal, a failed launch. In a process
#: that has imported the compiler, CUDA errors are of a class of its own.
CALL_ERRORS = Exception


#: Calls remembered by an op before it forgets them all; a server has some thousand kinds of call, a
#: fuzzer has more.
MOST_REMEMBERED = 1 << 16


class Op:
    """One op of a family, as an attribute of a loaded :class:`specplan.Pack`."""

    family: ClassVar[str]
    op: ClassVar[str]

    def __init__(self, pack: Pack) -> None:
        self._pack = pack
        # What calls came to so far, by whatever the op reads off its arguments: a compiled function
        # and the last of its integers, those that the call itself does not give.
        self._picked: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    @classmethod
    def idle_arguments(cls, plan: PlanRecord, device: torch.device) -> tuple[Any, ...]:
        """Arguments of a launch that does nothing, to load the plan's code."""
        raise NotImplementedError

    def pick(
        self,
        *,
        requests: int,
        tokens: int,
        problem: str | None = None,
        splits: int | None = None,
        dtype: str | None = None,
        arch: str | None = None,
        **geometry: int,
    ) -> Picked | Uncertified:
        """The plan that a call of this size would run, or why none would; launches nothing and
        needs no GPU.

        Parameters
        ----------
        requests, tokens
            Size of the call; rows = requests x tokens.
        problem
            Name of the geometry in the catalog, for example ``"mtp7"``; or give the geometry itself
            as keywords.
        splits, dtype
            Without them: the planning rule's splits, the family's first dtype.
        arch
            Without it: the only or first loaded arch.
        """
        arch_pack = self._pack._of_arch(arch)
        planning = PLANNING[self.family]
        if problem is not None:
            found = arch_pack.manifest.problems.get(self.family, {}).get(problem)
            if found is None:
                known = ", ".join(arch_pack.manifest.problems.get(self.family, {})) or "none"
                return Uncertified(
                    self.family,
                    arch_pack.manifest.arch,
                    Reason.UNKNOWN_PROBLEM,
                    f"no problem {problem!r}; problems: {known}",
                )
            geometry = dict(found)
        missing = [key for key in planning.geometry if key not in geometry]
        if missing or len(geometry) != len(planning.geometry):
            raise TypeError(
                f"{self.family} problems are given by name or by {', '.join(planning.geometry)}"
            )
        return self._pack._pick(
            self.family,
            self.op,
            arch_pack,
            tuple(geometry[key] for key in planning.geometry),
            dtype if dtype is not None else planning.dtypes[0],
            requests,
            tokens,
            splits,
            problem,
        )

    def require(self, *arguments: Any, **named: Any) -> None:
        """The same call, raising :class:`~specplan.UncertifiedCell` where it would be declined."""
        required(self(*arguments, **named))

    # For the ops

    def __call__(self, *arguments: Any, **named: Any) -> bool | Uncertified:
        """Launch; every op has its own signature."""
        raise NotImplementedError

    def _values(self, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Any, ...]:
        """The values of a call in the order of the op's signature; TypeError as for any call."""
        return tuple(signature(self.__call__).bind(*arguments, **named).arguments.values())

    def _resolve(
        self,
        key: tuple[Any, ...],
        device: int,
        geometry: tuple[int, ...],
        dtype: str,
        requests: int,
        tokens: int,
        splits: int | None = None,
    ) -> Any:
        """What a first call of its kind comes to: the compiled function, remembered under ``key``,
        or an Uncertified.
        """
        picked = self._chosen(device, geometry, dtype, requests, tokens, splits)
        if isinstance(picked, Uncertified):
            return picked
        return self._remember(key, (picked.function,))[0]

    def _chosen(
        self,
        device: int,
        geometry: tuple[int, ...],
        dtype: str,
        requests: int,
        tokens: int,
        splits: int | None = None,
    ) -> Picked | Uncertified:
        """The plan of a call on a device, with its code loaded there, or why there is none."""
        try:
            requests, tokens = index(requests), index(tokens)
        except TypeError as error:
            return self._refused(error, device)
        if requests < 1 or tokens < 1:
            detail = f"requests is {requests} and tokens is {tokens}; both must be at least 1"
            return self._declined(Reason.RANGE, detail, device)
        arch_pack = self._pack._of_device(device) if device >= 0 else None
        if arch_pack is None:
            where = f"cuda:{device}" if device >= 0 else "the CPU"
            return Uncertified(
                self.family,
                "",
                Reason.DEVICE,
                f"the tensors are on {where}, "
                f"the loaded packs are for {', '.join(self._pack.archs)}",
            )
        picked = self._pack._pick(
            self.family, self.op, arch_pack, geometry, dtype, requests, tokens, splits
        )
        if not isinstance(picked, Uncertified):
            self._pack._prepare(device, self.family)
        return picked

    def _remember(self, key: tuple[Any, ...], value: tuple[Any, ...]) -> tuple[Any, ...]:
        """Keep what calls with this key come to; returns the value."""
        if len(self._picked) >= MOST_REMEMBERED:
            self._picked.clear()
        self._picked[key] = value
        return value

    def _declined(self, reason: Reason, detail: str, device: int = -1) -> Uncertified:
        pack = self._pack._of_device(device) if device >= 0 else None
        return Uncertified(self.family, pack.manifest.arch if pack else "", reason, detail)

    def _refused(self, error: Exception, device: int = -1) -> Uncertified:
        """The compiled module's, or Python's, objection to an argument as an Uncertified."""
        return self._declined(Reason.ARGUMENT, " ".join(str(error).split()), device)

    def _failed(self, error: Exception) -> LaunchError:
        return LaunchError(
            f"{self.family}: the launch failed: {error}. CUDA errors are sticky: an earlier launch "
            "may be the cause"
        )

    def _again(
        self, tensors: tuple[torch.Tensor, ...], integers: tuple[int, ...], error: Exception
    ) -> bool | Uncertified:
        """A call that its hot path could not make: the first of its kind, refused, or failed.

        ``error`` is what the hot path stumbled over; nothing was launched then. With all ranges
        found good, a second refusal by the compiled function is a failed launch.
        """
        found = self._look_up(tensors, integers)
        if not found:
            return found  # type: ignore[no-any-return]
        function, *last = found
        integers = (*integers, *last)
        refusal = error if isinstance(error, ARGUMENT_ERRORS) else None
        answer = self._launched(function, tensors, integers, integers, refusal)
        return answer if isinstance(answer, Uncertified) else True

    def _look_up(self, tensors: tuple[torch.Tensor, ...], integers: tuple[int, ...]) -> Any:
        """What a call comes to, every range checked: the compiled function and the last of its
        integers, or an Uncertified.
        """
        raise NotImplementedError

    def _bound(
        self,
        function: Any,
        tensors: tuple[torch.Tensor, ...],
        integers: tuple[int, ...],
        idle: tuple[int, ...],
    ) -> Any:
        """A launch with its arguments converted once, after the compiled module has agreed to them
        in a launch of no work.

        The first tensor stays torch's, because that is how the call learns torch's current stream;
        the others become tvm-ffi tensors that share memory with, and keep alive, the ones given.
        """
        try:
            # The launch of no work has other integers, so the module does not see these before the
            # first launch().
            integers = tuple(map(index, integers))
        except TypeError as error:
            return self._refused(error, _device(tensors[0]))
        fitted = self._launched(function, tensors, integers, idle)
        if isinstance(fitted, Uncertified):
            return fitted
        function, tensors = fitted
        convert = library.tvm_ffi().from_dlpack
        return watched(partial(function, tensors[0], *map(convert, tensors[1:]), *integers))

    def _launched(
        self,
        function: Any,
        tensors: tuple[torch.Tensor, ...],
        integers: tuple[int, ...],
        launched: tuple[int, ...],
        error: Exception | None = None,
    ) -> tuple[Any, tuple[torch.Tensor, ...]] | Uncertified:
        """Launch with the integers ``launched``, fitting the call once if the compiled module
        refuses it.

        Returns the function and the tensors that the module took. ``error`` is a refusal that was
        already seen.
        """
        try:
            if error is None:
                try:
                    function(*tensors, *launched)
                    return function, tensors
                except ARGUMENT_ERRORS as refusal:
                    error = refusal
            fitted = self._fit(function, tensors, integers)
            if fitted is None:
                return self._refused(error, _device(tensors[0]))
            if isinstance(fitted, Uncertified):
                return fitted
            function, tensors = fitted
            function(*tensors, *launched)
        except ARGUMENT_ERRORS as refusal:
            return self._refused(refusal, _device(tensors[0]))
        except SpecplanError:
            raise
        except Exception as failure:
            raise self._failed(failure) from failure
        return fitted

    def _fit(
        self, function: Any, tensors: tuple[torch.Tensor, ...], integers: tuple[int, ...]
    ) -> tuple[Any, tuple[torch.Tensor, ...]] | Uncertified | None:
        """Another way to make a refused call, or None if there is none.

        The hot path looks a call up by less than its full geometry. A plan of another problem
        refuses such a call, and here it is looked up anew; an op may also have views of the same
        memory that the module takes.
        """
        return None


def _device(tensor: Any) -> int:
    return tensor.get_device() if isinstance(tensor, torch.Tensor) else -1


def required(answer: Any) -> Any:
    """The answer itself, or UncertifiedCell for a declined call."""
    if isinstance(answer, Uncertified):
        raise UncertifiedCell(answer)
    return answer
