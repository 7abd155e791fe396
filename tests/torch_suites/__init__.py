"""PyTorch's tests of its own process groups, run with Horovod's and compared with Gloo's.

suites        the suites, and where their files come from
coordinator   runs the tests of a suite on ranks that stay alive between tests
rank          runs one test on one rank
differences   tests that pass with Gloo and fail with Horovod, with the reason
__main__      command line, comparison and table

The tests come from the installed torch wheel, or from a folder with a checkout of PyTorch. This repository contains
none of them.
"""
