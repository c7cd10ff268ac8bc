"""SGLang 0.5.17 as the kernel of the compute layer, unforked. Open `kernel.py` first.

The role's process holds an `SGLangEngine` (kernel.py), which starts one engine process (worker.py) and talks to it over
a socket pair (wire.py). In that process SGLang's own scheduler runs (scheduler.py gives it another way in and out);
one plugin (plugin.py) takes over buffers and pages (buffers.py, pages.py, allocator.py), prefix cache (cache.py) and
sampling (batch_sampling.py) at SGLang's extension points. On a plain CPU also shim.py, platform.py and attention.py.
"""
