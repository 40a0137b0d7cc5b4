"""One file an operator: launch the kernels, autograd.Function for eager, torch.library for compile."""
