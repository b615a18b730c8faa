"""One GPU and what drives it: kernels compiled and launched, graphs, memory, calls of the driver."""
