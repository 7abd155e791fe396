"""Runs PyTorch's process group tests with Horovod's process group, and compares the outcomes with Gloo.

suites        the suites and the locations of their files
coordinator   runs the tests of a suite on ranks that stay alive between tests
rank          runs one test on one rank
differences   tests that pass with Gloo and fail with Horovod, with the reason
__main__      command line, comparison and table

The tests are part of the installed torch wheel or of a PyTorch checkout. This repository does not contain them.
"""
