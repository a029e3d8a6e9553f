"""Calls from one compiled loop to another by name, so that neither holds the code of the other.

numba links the code that a function calls into its own and optimises all of it once more. A loop
that calls loops that call others would be compiled once for each of them, and kept in each of their
files.
"""

from collections.abc import Callable
from copy import copy
from functools import partial
from importlib import import_module

from llvmlite import binding, ir
from numba.core.codegen import CPUCodeLibrary
from numba.core.compiler import CompileResult
from numba.core.registry import cpu_target


def callable_by_name(result: CompileResult, module: str, name: str, signature: str) -> str:
    """Make code known by a name, which is returned, to the linker and to numba. Other code that
    calls it loads the kernel `name` of `module` first, also where that other code was kept by an
    earlier process."""
    symbol = f"{module}.{name} {signature}"
    context = cpu_target.target_context
    binding.add_symbol(symbol, result.library.get_pointer_to_function(result.fndesc.llvm_func_name))
    described = copy(result.fndesc)
    described.mangled_name = symbol
    context.insert_user_function(
        symbol, described, [_loading_first(symbol, partial(_load, module, name, signature))]
    )
    return symbol


def _loading_first(symbol: str, load: Callable[[], None]) -> CPUCodeLibrary:
    """Return an empty library. Code that is linked with it, and kept, calls `load` before it is
    loaded."""
    library = cpu_target.target_context.codegen().create_library(symbol)
    module = library.create_ir_module(symbol)
    nothing = ir.Function(module, ir.FunctionType(ir.VoidType(), ()), f"{symbol} is loaded")
    ir.IRBuilder(
        nothing.append_basic_block()
    ).ret_void()  # numba links no library without a function
    library.add_ir_module(module)
    library._reload_init.add(load)
    library.finalize()
    return library


def _load(module: str, name: str, signature: str) -> None:
    getattr(import_module(module), name).entry(signature)
