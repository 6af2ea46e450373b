"""CUDA kernels in Numba, which compile and are tested on a machine without a GPU.

How to add one:

1. Write the body in a module here (`codec.py`, `gather.py`, `attention_….py`; every module in this package that is no
   part of the toolchain is found by itself). It imports `from numba import cuda` for `threadIdx`, `blockIdx`,
   `syncthreads` and `local.array`, and everything else that is not plain arithmetic from
   `kvtierd.gpu.kernels.primitives`. Helpers are decorated with `device_function` of the same module.
2. Register it: `register(Kernel(name=…, function=body, signature="void(…)", threads=…, registers={…}, reason=…))`.
   `canonical=True` for the few that `make test` compiles; `make kernels` compiles all of them. Variants are made by a
   function that returns a body; what the body captures are constants to Numba.
3. `kvtierctl kernels` shows registers, spills and shared memory per architecture; put the bounds and their reason in.
4. Test it in `tests/gpu/simulated/sim_….py` against an oracle: `make test` runs each of these files in a process of its
   own with Numba's simulator (at most 64 threads a launch: each is a thread of the operating system).

What differs between a device and the simulator, and how a body stays the same on both: integers that the primitives
return are uint32 on the device and unbounded Python integers in the simulator, so mask what a shift may carry beyond
32 bits; a float literal is a float64 to Numba, so write `np.float32(0.5)` or a module constant of that type; `range`
wants `int` bounds. A launch in the simulator is `kernel.launch(grid, arguments…)`, as on a device.
"""
