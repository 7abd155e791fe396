"""Patches for the sources of Horovod 0.28.1 as data, and a function that applies them.

Changes of kind `build` are required to compile with current versions of torch, CMake and Python, and without a CUDA
toolkit. Changes of kind `fix` correct run-time behavior; `unitrain horovod check` reports whether the installed Horovod
includes them.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from unitrain.errors import HorovodBuildError


@dataclass(frozen=True, kw_only=True)
class Edit:
    """A replacement in one source file. `before` must occur exactly once."""

    file: str
    before: str
    after: str


@dataclass(frozen=True, kw_only=True)
class Change:
    """A patch: its reason and its edits."""

    name: str
    kind: Literal["build", "fix"]
    reason: str
    edits: tuple[Edit, ...]


_CXX_STANDARD = ("set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 20)")
_CHECK_CUDA_IF_REQUESTED = "if(DEFINED HOROVOD_GPU_OPERATIONS)\n    check_language(CUDA)\nendif()\n"
_WAKE = """\
namespace {

struct Wake {
  std::mutex mutex;
  std::condition_variable condition;
  bool was_operation_added = false;
};

// Never destroyed, because the background thread outlives static objects.
Wake& wake = *new Wake;

void WakeBackgroundThread() {
  {
    std::lock_guard<std::mutex> guard(wake.mutex);
    wake.was_operation_added = true;
  }
  wake.condition.notify_one();
}

} // namespace

void TensorQueue::SleepUntil(std::chrono::steady_clock::time_point deadline,
                             bool wakes) {
  std::unique_lock<std::mutex> lock(wake.mutex);
  wake.condition.wait_until(
      lock, deadline, [wakes] { return wakes && wake.was_operation_added; });
  wake.was_operation_added = false;
}

bool TensorQueue::HasPendingOperations() const {
  std::lock_guard<std::mutex> guard(mutex_);
  return !tensor_table_.empty();
}

"""
_SLEEP_OF_A_CYCLE = """\
  auto start_time = std::chrono::steady_clock::now();
  auto sleep_duration = state.last_cycle_start +
                        std::chrono::microseconds(long(
                            state.parameter_manager.CycleTimeMs() * 1000.)) -
                        start_time;
  if (sleep_duration > std::chrono::steady_clock::duration::zero()) {
    std::this_thread::sleep_for(sleep_duration);
  }
"""
_SLEEP_UNTIL_AN_OPERATION = """\
  bool is_idle = state.idle_cycle_ms > 0 &&
                 !state.process_set_table.HasPendingOperations(0);
  // With several process sets, ranks wait for others that enqueue nothing.
  double cycle_ms = is_idle && state.process_set_table.Ids().size() == 1
                        ? state.idle_cycle_ms
                        : state.parameter_manager.CycleTimeMs();
  TensorQueue::SleepUntil(state.last_cycle_start + std::chrono::microseconds(
                                                       long(cycle_ms * 1000.)),
                          is_idle);
"""
_PENDING_OPERATIONS_OF_PROCESS_SETS = """\
bool ProcessSetTable::HasPendingOperations(int32_t min_id) {
  std::lock_guard<std::recursive_mutex> guard(mutex);
  return std::any_of(ids_.begin(), ids_.end(), [&](int32_t id) {
    return id >= min_id && Get(id).tensor_queue.HasPendingOperations();
  });
}

"""
_EXCHANGE_REQUESTS = """\
namespace {

// Process sets, as sorted global ranks, that this rank has requested to add or
// to remove.
struct ProcessSetRequests {
  std::mutex mutex;
  std::set<std::vector<int>> additions;
  std::set<std::vector<int>> removals;
};

// Never destroyed, because the background thread outlives static objects.
ProcessSetRequests& process_set_requests = *new ProcessSetRequests;

// Exchange the requests of all ranks, and add and remove the process sets that
// all their members have requested. Called by all ranks in the same cycle.
void ExchangeProcessSetRequests(HorovodGlobalState& state) {
  auto& table = state.process_set_table;
  auto& controller = *state.global_controller;
  std::lock_guard<std::mutex> guard(process_set_requests.mutex);
  state.has_process_set_requests = false;

  // Each request consists of 1 or 0 for an addition or a removal, the number of
  // ranks, and the ranks.
  std::vector<int> own;
  for (bool adds : {false, true}) {
    for (const auto& ranks : adds ? process_set_requests.additions
                                  : process_set_requests.removals) {
      own.push_back(adds);
      own.push_back((int)ranks.size());
      own.insert(own.end(), ranks.begin(), ranks.end());
    }
  }
  std::vector<int> lengths;
  controller.Allgather2Ints({(int)own.size(), 0}, lengths);
  std::map<std::vector<int>, std::set<int>> requesting_ranks;
  for (int rank = 0; rank < controller.GetSize(); ++rank) {
    std::vector<int> requests(lengths[2 * rank]);
    if (requests.empty()) {
      continue;
    }
    if (rank == controller.GetRank()) {
      requests = own;
    }
    controller.Bcast(requests.data(), requests.size() * sizeof(int), rank,
                     Communicator::GLOBAL);
    for (auto it = requests.begin(); it != requests.end();) {
      auto end = it + 2 + it[1];
      requesting_ranks[std::vector<int>(it, end)].insert(rank);
      it = end;
    }
  }

  for (const auto& entry : requesting_ranks) {
    bool adds = entry.first[0] == 1;
    std::vector<int> ranks(entry.first.begin() + 2, entry.first.end());
    if (!std::includes(entry.second.begin(), entry.second.end(), ranks.begin(),
                       ranks.end())) {
      continue;
    }
    (adds ? process_set_requests.additions : process_set_requests.removals)
        .erase(ranks);
    int id = table.FindId(ranks);
    if (adds && id < 0) {
      auto& process_set = GetProcessSetOrAddUnitialized(ranks, id);
#if HAVE_MPI
      if (state.control_operation == LibType::MPI) {
        process_set.Initialize(global_mpi_context);
      }
#endif // HAVE_MPI
#if HAVE_GLOO
      if (state.control_operation == LibType::GLOO) {
        process_set.Initialize(global_gloo_context);
      }
#endif // HAVE_GLOO
    } else if (!adds && id > 0) {
      table.Remove(id);
    }
  }
}

} // namespace

"""
_REQUEST_FUNCTIONS = """\
// Request a process set of sorted global ranks, without waiting. Only members
// call this function, until it returns the id, an error code, or
// HOROVOD_PROCESS_SET_PENDING if it must be called again.
const int HOROVOD_PROCESS_SET_PENDING = -7;

int horovod_request_process_set(const int* ranks, int nranks) {
  if (!horovod_global.initialization_done) {
    return HOROVOD_PROCESS_SET_ERROR_INIT;
  }
  if (horovod_global.shut_down) {
    return HOROVOD_PROCESS_SET_ERROR_SHUTDOWN;
  }
  std::unique_lock<std::mutex> lock(process_set_requests.mutex,
                                    std::try_to_lock);
  if (!lock) {
    return HOROVOD_PROCESS_SET_PENDING;
  }
  std::vector<int> key(ranks, ranks + nranks);
  process_set_requests.removals.erase(key);
  int id = horovod_global.process_set_table.FindId(key);
  if (id >= 0 &&
      horovod_global.process_set_table.Get(id).initialization_done) {
    return id;
  }
  if (process_set_requests.additions.insert(key).second) {
    horovod_global.has_process_set_requests = true;
  }
  return HOROVOD_PROCESS_SET_PENDING;
}

// Cancel this rank's request for a process set, or request its removal if it
// exists. The process set is removed when all members have called this
// function. Return 0, or HOROVOD_PROCESS_SET_PENDING if it must be called again.
int horovod_release_process_set(const int* ranks, int nranks) {
  std::unique_lock<std::mutex> lock(process_set_requests.mutex,
                                    std::try_to_lock);
  if (!lock) {
    return HOROVOD_PROCESS_SET_PENDING;
  }
  std::vector<int> key(ranks, ranks + nranks);
  process_set_requests.additions.erase(key);
  if (horovod_global.initialization_done &&
      horovod_global.process_set_table.FindId(key) > 0 &&
      process_set_requests.removals.insert(key).second) {
    horovod_global.has_process_set_requests = true;
  }
  return 0;
}

"""

CHANGES: tuple[Change, ...] = (
    Change(
        name="cxx20",
        kind="build",
        reason="torch's headers require C++17, or C++20 in newer versions, but Horovod selects C++14.",
        edits=(
            Edit(file="CMakeLists.txt", before=_CXX_STANDARD[0], after=_CXX_STANDARD[1]),
            Edit(file="horovod/torch/CMakeLists.txt", before=_CXX_STANDARD[0], after=_CXX_STANDARD[1]),
        ),
    ),
    Change(
        name="no-toolkit",
        kind="build",
        reason="With a CUDA torch, CMake uses any CUDA toolkit that it finds, even for CPU operations.",
        edits=(
            Edit(
                file="CMakeLists.txt",
                before="check_language(CUDA)\nif(NOT CMAKE_CUDA_COMPILER)\n",
                after=_CHECK_CUDA_IF_REQUESTED + "if(NOT CMAKE_CUDA_COMPILER AND DEFINED HOROVOD_GPU_OPERATIONS)\n",
            ),
            Edit(
                file="cmake/Modules/FindPytorch.cmake",
                before='string(TOUPPER "${Pytorch_CUDA}" Pytorch_CUDA)\n',
                after='string(TOUPPER "${Pytorch_CUDA}" Pytorch_CUDA)\n'
                'if("$ENV{HOROVOD_GPU_OPERATIONS}" STREQUAL "")\n    set(Pytorch_CUDA FALSE)\nendif()\n',
            ),
        ),
    ),
    Change(
        name="no-distutils",
        kind="build",
        reason="Python 3.12 does not contain distutils, so Python.h is not found and horovodrun does not start.",
        edits=(
            Edit(
                file="horovod/torch/CMakeLists.txt",
                before="from distutils.sysconfig import get_python_inc; print(get_python_inc())",
                after="import sysconfig; print(sysconfig.get_path('include'))",
            ),
            Edit(
                file="horovod/runner/js_run.py",
                before="from distutils.spawn import find_executable\n",
                after="from shutil import which as find_executable\n",
            ),
        ),
    ),
    Change(
        name="any-path",
        kind="build",
        reason="The path of the build folder is used as a regular expression. With a '+', the wheel lacks its library.",
        edits=(
            Edit(
                file="cmake/Utilities.cmake",
                before='string(REGEX REPLACE "${PROJECT_SOURCE_DIR}(/)?" "" SUB_FOLDER "${CMAKE_CURRENT_SOURCE_DIR}")',
                after='file(RELATIVE_PATH SUB_FOLDER "${PROJECT_SOURCE_DIR}" "${CMAKE_CURRENT_SOURCE_DIR}")',
            ),
        ),
    ),
    Change(
        name="build-record",
        kind="build",
        reason="The wheel contains a record of its build, which `unitrain horovod check` reads.",
        edits=(
            Edit(
                file="setup.py",
                before="      packages=find_packages(),\n",
                after="      packages=find_packages(),\n      package_data={'horovod': ['unitrain_build.json']},\n",
            ),
        ),
    ),
    Change(
        name="gloo-interface",
        kind="fix",
        reason="All process sets ignore HOROVOD_GLOO_IFACE and advertise the address of the host's own name. If it is "
        "127.0.1.1, the default of Debian, several hosts cannot connect.",
        edits=(
            Edit(
                file="horovod/common/gloo/gloo_context.cc",
                before="  attr device_attr;\n  device_attr.iface = gloo_iface_;\n  device_attr.ai_family = AF_UNSPEC;\n"
                "  auto dev = CreateDevice(device_attr);\n\n  global_ctx = global_context.ctx;\n",
                after="  gloo_iface_ = global_context.gloo_iface_;\n"
                "  attr device_attr;\n  device_attr.iface = gloo_iface_;\n  device_attr.ai_family = AF_UNSPEC;\n"
                "  auto dev = CreateDevice(device_attr);\n\n  global_ctx = global_context.ctx;\n",
            ),
        ),
    ),
    Change(
        name="gloo-stall",
        kind="fix",
        reason="Under the Gloo controller the list of ranks stays empty (reserve instead of resize), so the stall "
        "inspector finds no missing ranks: HOROVOD_STALL_SHUTDOWN_TIME_SECONDS has no effect and the job hangs.",
        edits=(
            Edit(
                file="horovod/common/gloo/gloo_controller.cc",
                before="global_ranks_.reserve(size_);",
                after="global_ranks_.resize(size_);",
            ),
        ),
    ),
    Change(
        name="gloo-send-buffer",
        kind="fix",
        reason="A reducescatter permanently sets the send buffers of its connections to the size of its message. After "
        "a small one, a broadcast of 16 MB takes 400 times as long. With the fix, the kernel chooses the size.",
        edits=(
            Edit(
                file="third_party/gloo/gloo/transport/tcp/pair.cc",
                before="      sendBufferSize_(0),",
                after="      sendBufferSize_(kMaxSendBufferSize),",
            ),
        ),
    ),
    Change(
        name="idle-cycle",
        kind="fix",
        reason="The background thread starts operations once per cycle, so each operation of a small model waits for "
        "up to a cycle, and a shorter cycle takes CPU time from the training. With HOROVOD_IDLE_CYCLE_TIME, in "
        "milliseconds, an idle thread wakes when an operation is enqueued, and otherwise only at the end of that time.",
        edits=(
            Edit(
                file="horovod/common/tensor_queue.h",
                before="#include <iostream>\n",
                after="#include <chrono>\n#include <iostream>\n",
            ),
            Edit(
                file="horovod/common/tensor_queue.h",
                before="  void RemoveJoinTensor();\n",
                after="  void RemoveJoinTensor();\n\n"
                "  // Return whether operations have been enqueued that have not started.\n"
                "  bool HasPendingOperations() const;\n\n"
                "  // Sleep until `deadline`. With `wakes`, return early if an operation has\n"
                "  // been added to any queue since the previous call.\n"
                "  static void SleepUntil(std::chrono::steady_clock::time_point deadline,\n"
                "                         bool wakes);\n",
            ),
            Edit(
                file="horovod/common/tensor_queue.cc",
                before="#include <assert.h>\n",
                after="#include <assert.h>\n\n#include <condition_variable>\n",
            ),
            Edit(
                file="horovod/common/tensor_queue.cc",
                before="// Add a TensorTableEntry as well as its message to the queue.\n"
                "Status TensorQueue::AddToTensorQueue(TensorTableEntry& e, Request& message) {\n"
                "  std::lock_guard<std::mutex> guard(mutex_);\n",
                after=_WAKE + "// Add a TensorTableEntry as well as its message to the queue.\n"
                "Status TensorQueue::AddToTensorQueue(TensorTableEntry& e, Request& message) {\n"
                "  std::unique_lock<std::mutex> guard(mutex_);\n",
            ),
            Edit(
                file="horovod/common/tensor_queue.cc",
                before="  message_queue_.push(std::move(message));\n  return Status::OK();\n",
                after="  message_queue_.push(std::move(message));\n"
                "  guard.unlock();\n  WakeBackgroundThread();\n  return Status::OK();\n",
            ),
            Edit(
                file="horovod/common/tensor_queue.cc",
                before="std::vector<Request>& messages) {\n  std::lock_guard<std::mutex> guard(mutex_);\n",
                after="std::vector<Request>& messages) {\n  std::unique_lock<std::mutex> guard(mutex_);\n",
            ),
            Edit(
                file="horovod/common/tensor_queue.cc",
                before="    message_queue_.push(std::move(messages[i]));\n  }\n  return Status::OK();\n",
                after="    message_queue_.push(std::move(messages[i]));\n  }\n"
                "  guard.unlock();\n  WakeBackgroundThread();\n  return Status::OK();\n",
            ),
            Edit(
                file="horovod/common/global_state.h",
                before="  // Whether collective context has been completed on the background thread.\n",
                after="  // Milliseconds between cycles while no operation is pending, or 0 to use the\n"
                "  // cycle time.\n  double idle_cycle_ms = 0;\n\n"
                "  // Whether collective context has been completed on the background thread.\n",
            ),
            Edit(
                file="horovod/common/operations.cc",
                before="  // Override response cache capacity, if it's set.\n",
                after="  // Not with MPI, where a rank that waits for the others uses CPU time.\n"
                '  auto horovod_idle_cycle_time = std::getenv("HOROVOD_IDLE_CYCLE_TIME");\n'
                "  if (horovod_idle_cycle_time != nullptr &&\n"
                "      state.control_operation == LibType::GLOO) {\n"
                "    state.idle_cycle_ms = std::strtof(horovod_idle_cycle_time, nullptr);\n"
                "  }\n\n"
                "  // Override response cache capacity, if it's set.\n",
            ),
            Edit(
                file="horovod/common/operations.cc",
                before=_SLEEP_OF_A_CYCLE,
                after=_SLEEP_UNTIL_AN_OPERATION,
            ),
            Edit(
                file="horovod/common/process_set.h",
                before="  void MarkProcessSetForRemoval(int32_t process_set_id);\n",
                after="  void MarkProcessSetForRemoval(int32_t process_set_id);\n\n"
                "  // Return whether a process set with at least this id has operations that\n"
                "  // have not started.\n"
                "  bool HasPendingOperations(int32_t min_id);\n",
            ),
            Edit(
                file="horovod/common/process_set.cc",
                before="void ProcessSetTable::MarkProcessSetForRemoval(",
                after=_PENDING_OPERATIONS_OF_PROCESS_SETS + "void ProcessSetTable::MarkProcessSetForRemoval(",
            ),
        ),
    ),
    Change(
        name="process-sets",
        kind="fix",
        reason="All ranks must add a process set at the same time, and with HOROVOD_DYNAMIC_PROCESS_SETS, every cycle "
        "contains one more allgather. With horovod_request_process_set, only the members of a process set take part, "
        "and a cycle in which no process set is requested or used costs nothing.",
        edits=(
            Edit(
                file="horovod/common/response_cache.h",
                before="#define NUM_STATUS_BITS 3\n",
                after="#define NUM_STATUS_BITS 5\n",
            ),
            Edit(
                file="horovod/common/response_cache.h",
                before="    INVALID_IN_QUEUE = 2\n",
                after="    INVALID_IN_QUEUE = 2,\n    PROCESS_SETS_REQUESTED = 3,\n    PROCESS_SETS_USED = 4\n",
            ),
            Edit(
                file="horovod/common/response_cache.h",
                before="  // Method to sync state and bit sets across workers.\n",
                after="  // Whether this rank, and after sync() any rank, has requested process sets,\n"
                "  // and has operations pending in process sets other than the global one.\n"
                "  bool process_sets_requested = false;\n  bool process_sets_used = false;\n\n"
                "  // Method to sync state and bit sets across workers.\n",
            ),
            Edit(
                file="horovod/common/response_cache.cc",
                before="  // Before communication, remove any invalid bits from cache hit set.\n",
                after="  if (!process_sets_requested) {\n"
                "    bitvector_[0] |= (1ull << StatusBit::PROCESS_SETS_REQUESTED);\n  }\n"
                "  if (!process_sets_used) {\n"
                "    bitvector_[0] |= (1ull << StatusBit::PROCESS_SETS_USED);\n  }\n\n"
                "  // Before communication, remove any invalid bits from cache hit set.\n",
            ),
            Edit(
                file="horovod/common/response_cache.cc",
                before="  // If any worker has invalid cache entries, communicate invalid bits across\n",
                after="  process_sets_requested =\n"
                "      !cache_hits_.erase(StatusBit::PROCESS_SETS_REQUESTED - NUM_STATUS_BITS);\n"
                "  process_sets_used =\n"
                "      !cache_hits_.erase(StatusBit::PROCESS_SETS_USED - NUM_STATUS_BITS);\n\n"
                "  // If any worker has invalid cache entries, communicate invalid bits across\n",
            ),
            Edit(
                file="horovod/common/global_state.h",
                before="  // Rank storage for process sets requested in InitializeHorovodOnce to be\n",
                after="  // Whether this rank has new requests for process sets.\n"
                "  std::atomic_bool has_process_set_requests{false};\n\n"
                "  // Whether any rank has new requests for process sets, and operations\n"
                "  // pending in process sets other than the global one, as of this cycle.\n"
                "  bool any_rank_requests_process_sets = false;\n  bool any_rank_uses_process_sets = false;\n\n"
                "  // Rank storage for process sets requested in InitializeHorovodOnce to be\n",
            ),
            Edit(
                file="horovod/common/controller.cc",
                before="  cache_coordinator.set_should_shut_down(should_shut_down);\n",
                after="  cache_coordinator.set_should_shut_down(should_shut_down);\n\n"
                "  bool is_global = this == state.global_controller.get();\n"
                "  if (is_global) {\n"
                "    cache_coordinator.process_sets_requested =\n        state.has_process_set_requests;\n"
                "    cache_coordinator.process_sets_used =\n        state.process_set_table.HasPendingOperations(1);\n"
                "    // Without a cache, the ranks do not exchange these values.\n"
                "    state.any_rank_requests_process_sets = true;\n"
                "    state.any_rank_uses_process_sets = true;\n  }\n",
            ),
            Edit(
                file="horovod/common/controller.cc",
                before="    CoordinateCacheAndState(cache_coordinator);\n",
                after="    CoordinateCacheAndState(cache_coordinator);\n"
                "    if (is_global) {\n"
                "      state.any_rank_requests_process_sets =\n          cache_coordinator.process_sets_requested;\n"
                "      state.any_rank_uses_process_sets =\n          cache_coordinator.process_sets_used;\n    }\n",
            ),
            Edit(
                file="horovod/common/process_set.h",
                before="  bool ProcessSetHasJustBeenRemoved();\n",
                after="  bool ProcessSetHasJustBeenRemoved();\n\n"
                "  // Finalize and deregister a process set. Its id is not reused, because NCCL\n"
                "  // communicators are cached by id.\n"
                "  void Remove(int32_t process_set_id);\n",
            ),
            Edit(
                file="horovod/common/process_set.cc",
                before="bool ProcessSetTable::ProcessSetHasJustBeenRemoved() {\n",
                after="void ProcessSetTable::Remove(int32_t process_set_id) {\n"
                "  std::lock_guard<std::recursive_mutex> guard(mutex);\n"
                "  Get(process_set_id).Finalize(PROCESS_SET_HAS_BEEN_REMOVED);\n"
                "  id_to_process_set_.erase(process_set_id);\n"
                "  ids_.erase(std::find(ids_.begin(), ids_.end(), process_set_id));\n}\n\n"
                "bool ProcessSetTable::ProcessSetHasJustBeenRemoved() {\n",
            ),
            Edit(
                file="horovod/common/operations.cc",
                before="#include <atomic>\n#include <cassert>\n",
                after="#include <algorithm>\n#include <atomic>\n#include <cassert>\n",
            ),
            Edit(
                file="horovod/common/operations.cc",
                before="// The background thread loop coordinates all the controller processes and the\n",
                after=_EXCHANGE_REQUESTS
                + "// The background thread loop coordinates all the controller processes and the\n",
            ),
            Edit(
                file="horovod/common/operations.cc",
                before="    if (should_shutdown) {\n      break;\n    }\n",
                after="    if (should_shutdown ||\n"
                "        (process_set_id != 0 && !state.any_rank_uses_process_sets)) {\n      break;\n    }\n",
            ),
            Edit(
                file="horovod/common/operations.cc",
                before="    should_shutdown |= response_list.shutdown();\n  }\n\n  return !should_shutdown;\n",
                after="    should_shutdown |= response_list.shutdown();\n  }\n\n"
                "  if (!should_shutdown && state.any_rank_requests_process_sets) {\n"
                "    ExchangeProcessSetRequests(state);\n  }\n\n  return !should_shutdown;\n",
            ),
            Edit(
                file="horovod/common/operations.cc",
                before="int horovod_process_set_rank(int process_set_id) {\n",
                after=_REQUEST_FUNCTIONS + "int horovod_process_set_rank(int process_set_id) {\n",
            ),
        ),
    ),
    Change(
        name="repeated-init",
        kind="fix",
        reason="When all ranks have read the addresses of one scope, horovodrun's rendezvous server forgets which "
        "ranks have read those of other scopes. It keeps these addresses, and the next hvd.init() reads them and "
        "fails.",
        edits=(
            Edit(
                file="horovod/runner/http/http_server.py",
                before="                        self.server.finished_list.clear()\n",
                after="                        del self.server.finished_list[scope]\n",
            ),
        ),
    ),
    Change(
        name="mpi-signals",
        kind="fix",
        reason="horovodrun --mpi replaces itself by a shell that waits for mpirun. The SIGTERM of a scheduler ends "
        "only the shell, and mpirun and all ranks continue.",
        edits=(
            Edit(
                file="horovod/runner/mpi_run.py",
                before="['/bin/sh', '-c', mpirun_command]",
                after="['/bin/sh', '-c', 'exec ' + mpirun_command]",
            ),
        ),
    ),
)


def runtime_fixes(changes: tuple[Change, ...] = CHANGES) -> tuple[str, ...]:
    """Return the names of the changes that fix behavior at run time."""
    return tuple(change.name for change in changes if change.kind == "fix")


def digest(changes: tuple[Change, ...] = CHANGES) -> str:
    """Return a short digest of all edits, which is part of a wheel's cache key."""
    parts = (part for change in changes for edit in change.edits for part in (edit.file, edit.before, edit.after))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def apply(source: Path, changes: tuple[Change, ...] = CHANGES) -> tuple[str, ...]:
    """Apply the changes to `source`, and return the names of the newly applied changes.

    Files are written only if all edits succeed.
    """
    texts: dict[str, str] = {}
    applied: list[str] = []
    for change in changes:
        is_new = [_apply_edit(source, texts, change, edit) for edit in change.edits]
        if any(is_new):
            applied.append(change.name)
    for file, text in texts.items():
        (source / file).write_text(text)
    return tuple(applied)


def _apply_edit(source: Path, texts: dict[str, str], change: Change, edit: Edit) -> bool:
    """Store the edited text of a file in `texts`. Return False if the edit was applied before."""
    path = source / edit.file
    if edit.file not in texts and not path.is_file():
        raise HorovodBuildError(
            f"Change {change.name!r} is for {edit.file}, which does not exist in {source}. "
            "Use the unpacked sdist of Horovod 0.28.1."
        )
    text = texts.get(edit.file) or path.read_text()
    # Some `after` texts contain their `before` text, so applied edits are removed before counting.
    occurrences = text.replace(edit.after, "").count(edit.before)
    if edit.after in text and occurrences == 0:
        return False
    if occurrences != 1:
        raise HorovodBuildError(
            f"Change {change.name!r} expects this text once in {edit.file}, but it occurs {occurrences} times: "
            f"{edit.before.strip()!r}. Build from the unchanged sdist of Horovod 0.28.1."
        )
    texts[edit.file] = text.replace(edit.before, edit.after)
    return True


def format_diff(change: Change) -> Iterator[str]:
    """Yield the lines of a change as a short diff, for `--dry-run`."""
    for edit in change.edits:
        yield f"{edit.file}"
        for line in difflib.ndiff(edit.before.splitlines(), edit.after.splitlines()):
            if line[0] in "+-":
                yield f"  {line}"
