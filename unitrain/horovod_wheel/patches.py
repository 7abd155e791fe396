"""The patches for the sources of Horovod 0.28.1.

Patches of kind `build` are required to build with current versions of torch, CMake and Python, without a CUDA toolkit,
and in any folder, or to add the build record to the wheel. Patches of kind `fix` correct run-time behavior or add
features; `unitrain horovod check` reports whether the installed Horovod includes them.
"""

from __future__ import annotations

from unitrain.horovod_wheel.patching import Edit, Patch
from unitrain.horovod_wheel.process_set_patch import PROCESS_SETS

_CXX_STANDARD = ("set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 20)")
_CHECK_CUDA_IF_REQUESTED = "if(DEFINED HOROVOD_GPU_OPERATIONS)\n    check_language(CUDA)\nendif()\n"
_WAKE = """\
namespace {

struct Wake {
  std::mutex mutex;
  std::condition_variable condition;
  bool is_requested = false;
  std::function<void()> wake_other_ranks;
};

// Never destroyed, because the background thread outlives static objects.
Wake& wake = *new Wake;

} // namespace

void TensorQueue::WakeBackgroundThread(bool wakes_other_ranks) {
  {
    std::lock_guard<std::mutex> guard(wake.mutex);
    wake.is_requested = true;
    if (wakes_other_ranks && wake.wake_other_ranks) {
      wake.wake_other_ranks();
    }
  }
  wake.condition.notify_one();
}

void TensorQueue::SetWakeOtherRanks(std::function<void()> function) {
  std::lock_guard<std::mutex> guard(wake.mutex);
  wake.wake_other_ranks = std::move(function);
}

void TensorQueue::SleepUntil(std::chrono::steady_clock::time_point deadline,
                             bool wakes) {
  std::unique_lock<std::mutex> lock(wake.mutex);
  wake.condition.wait_until(
      lock, deadline, [wakes] { return wakes && wake.is_requested; });
  wake.is_requested = false;
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
  // With several process sets, ranks wait for others that enqueue nothing,
  // and wake them.
  bool is_woken =
      state.process_set_table.Ids().size() == 1 || CanWakeOtherRanks();
  double cycle_ms = is_idle && is_woken
                        ? state.idle_cycle_ms
                        : state.parameter_manager.CycleTimeMs();
  TensorQueue::SleepUntil(state.last_cycle_start + std::chrono::microseconds(
                                                       long(cycle_ms * 1000.)),
                          is_idle);
"""
_RESULTS_OF_REDUCE_SCATTER = """\
    index = 0;
    bufferOffset = 0;
    for (const auto& distMap : distMapForRecv_) {
"""
_WAIT_BEFORE_RESULTS = """\
    // The results overwrite the data of these sends.
    for (int i = 0; i < stepsWithinBlock_; i++) {
      if (sendOffsets_[i] < count_) {
        sendDataBufs_[i]->waitSend();
      }
    }
    for (size_t i = 0; i < largerBlockSendDataBufs_.size(); i++) {
      if (sendCountToLargerBlock_ * i < totalItemsToSend) {
        largerBlockSendDataBufs_[i]->waitSend();
      }
    }
    for (auto& sendDataBuf : distSendDataBufs_) {
      sendDataBuf->waitSend();
    }
"""
_END_OF_REDUCE_SCATTER = """\
    for (auto& recvNotificationBuf : recvNotificationBufs_) {
      recvNotificationBuf->waitRecv();
    }
"""
_WAIT_FOR_NOTIFICATIONS = """\
    for (auto& sendNotificationBuf : sendNotificationBufs_) {
      sendNotificationBuf->waitSend();
    }
"""
_SEND_OF_ALLGATHER = "out->send(sendRank, slot, byteOffsets[sendIndex], byteCounts[sendIndex]);\n"
_RECEIVE_OF_ALLGATHER = "out->recv(recvRank, slot, byteOffsets[recvIndex], byteCounts[recvIndex]);\n"
_SEND_AND_RECEIVE_OF_ALLTOALL = """\
    int sendRank = (myRank + i) % worldSize;
    int recvRank = (myRank + worldSize - i) % worldSize;
    in->send(
        sendRank, slot, inOffsetPerRank[sendRank], inLengthPerRank[sendRank]);
    out->recv(
        recvRank, slot, outOffsetPerRank[recvRank], outLengthPerRank[recvRank]);
  }
"""
_RECEIVE_AND_SEND_OF_ALLTOALL = """\
    int recvRank = (myRank + worldSize - i) % worldSize;
    out->recv(
        recvRank, slot, outOffsetPerRank[recvRank], outLengthPerRank[recvRank]);
  }
  for (int i = 1; i < worldSize; i++) {
    int sendRank = (myRank + i) % worldSize;
    in->send(
        sendRank, slot, inOffsetPerRank[sendRank], inLengthPerRank[sendRank]);
  }
"""
_PENDING_OPERATIONS_OF_PROCESS_SETS = """\
bool ProcessSetTable::HasPendingOperations(int32_t min_id) {
  std::lock_guard<std::recursive_mutex> guard(mutex);
  return std::any_of(ids_.begin(), ids_.end(), [&](int32_t id) {
    return id >= min_id && Get(id).tensor_queue.HasPendingOperations();
  });
}

"""

PATCHES: tuple[Patch, ...] = (
    Patch(
        name="cxx20",
        kind="build",
        reason="torch's headers require C++17, or C++20 in newer versions, but Horovod selects C++14.",
        edits=(
            Edit(file="CMakeLists.txt", before=_CXX_STANDARD[0], after=_CXX_STANDARD[1]),
            Edit(file="horovod/torch/CMakeLists.txt", before=_CXX_STANDARD[0], after=_CXX_STANDARD[1]),
        ),
    ),
    Patch(
        name="no-toolkit",
        kind="build",
        reason="With a CUDA build of torch, CMake uses any CUDA toolkit that it finds, even to build for CPUs only.",
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
    Patch(
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
    Patch(
        name="any-path",
        kind="build",
        reason="The path of the build folder is used as a regular expression. If the path contains a '+', the wheel is "
        "built without its shared library.",
        edits=(
            Edit(
                file="cmake/Utilities.cmake",
                before='string(REGEX REPLACE "${PROJECT_SOURCE_DIR}(/)?" "" SUB_FOLDER "${CMAKE_CURRENT_SOURCE_DIR}")',
                after='file(RELATIVE_PATH SUB_FOLDER "${PROJECT_SOURCE_DIR}" "${CMAKE_CURRENT_SOURCE_DIR}")',
            ),
        ),
    ),
    Patch(
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
    Patch(
        name="gloo-interface",
        kind="fix",
        reason="All process sets ignore HOROVOD_GLOO_IFACE and advertise the address to which the host name resolves. "
        "If this is 127.0.1.1, as on Debian by default, the hosts cannot connect to each other.",
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
    Patch(
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
    Patch(
        name="gloo-send-buffer",
        kind="fix",
        reason="A reducescatter permanently sets the send buffers of its connections to the size of its message. After "
        "a small reducescatter, a broadcast of 16 MB takes 400 times as long. With the fix, the kernel chooses the "
        "size.",
        edits=(
            Edit(
                file="third_party/gloo/gloo/transport/tcp/pair.cc",
                before="      sendBufferSize_(0),",
                after="      sendBufferSize_(kMaxSendBufferSize),",
            ),
        ),
    ),
    Patch(
        name="gloo-pending-sends",
        kind="fix",
        reason="A reducescatter overwrites data that has not been sent yet with its result, and then frees the buffer. "
        "With three ranks and a slow connection, other ranks receive wrong values, or the job ends with 'writev: Bad "
        "address'.",
        edits=(
            Edit(
                file="third_party/gloo/gloo/reduce_scatter.h",
                before=_RESULTS_OF_REDUCE_SCATTER,
                after=_WAIT_BEFORE_RESULTS + _RESULTS_OF_REDUCE_SCATTER,
            ),
            Edit(
                file="third_party/gloo/gloo/reduce_scatter.h",
                before=_END_OF_REDUCE_SCATTER,
                after=_END_OF_REDUCE_SCATTER + _WAIT_FOR_NOTIFICATIONS,
            ),
        ),
    ),
    Patch(
        name="gloo-receive-first",
        kind="fix",
        reason="An allgather or alltoall sends its data before the message that lets the other rank send. If both "
        "ranks use the same connection, the message waits behind the data, so that the ranks send one after the other. "
        "On a slow network, the operation then takes 1.3 to 1.7 times as long.",
        edits=(
            *(
                Edit(
                    file="third_party/gloo/gloo/allgatherv.cc",
                    before=context + _SEND_OF_ALLGATHER + indent + _RECEIVE_OF_ALLGATHER,
                    after=context + _RECEIVE_OF_ALLGATHER + indent + _SEND_OF_ALLGATHER,
                )
                for context, indent in (
                    ("    if (i == 0) {\n      ", "      "),
                    ("    out->waitRecv(opts.timeout);\n    ", "    "),
                )
            ),
            Edit(
                file="third_party/gloo/gloo/alltoallv.cc",
                before=_SEND_AND_RECEIVE_OF_ALLTOALL,
                after=_RECEIVE_AND_SEND_OF_ALLTOALL,
            ),
        ),
    ),
    Patch(
        name="idle-cycle",
        kind="fix",
        reason="The background thread starts operations once per cycle, so each operation of a small model waits for "
        "up to a cycle, and a shorter cycle takes CPU time from the training. With HOROVOD_IDLE_CYCLE_TIME, in "
        "milliseconds, an idle thread wakes when an operation is enqueued, and otherwise only at the end of that time.",
        edits=(
            Edit(
                file="horovod/common/tensor_queue.h",
                before="#include <iostream>\n",
                after="#include <chrono>\n#include <functional>\n#include <iostream>\n",
            ),
            Edit(
                file="horovod/common/tensor_queue.h",
                before="  void RemoveJoinTensor();\n",
                after="  void RemoveJoinTensor();\n\n"
                "  // Return whether operations have been enqueued that have not started.\n"
                "  bool HasPendingOperations() const;\n\n"
                "  // Sleep until `deadline`. With `wakes`, return early if\n"
                "  // WakeBackgroundThread has been called since the previous call, for example\n"
                "  // because an operation has been added to any queue.\n"
                "  static void SleepUntil(std::chrono::steady_clock::time_point deadline,\n"
                "                         bool wakes);\n\n"
                "  // Wake this rank's background thread, and with `wakes_other_ranks` also\n"
                "  // those of other ranks, with the function of SetWakeOtherRanks.\n"
                "  static void WakeBackgroundThread(bool wakes_other_ranks);\n\n"
                "  static void SetWakeOtherRanks(std::function<void()> function);\n",
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
                "  bool wakes_other_ranks = e.process_set_id != 0;\n"
                "  std::unique_lock<std::mutex> guard(mutex_);\n",
            ),
            Edit(
                file="horovod/common/tensor_queue.cc",
                before="  message_queue_.push(std::move(message));\n  return Status::OK();\n",
                after="  message_queue_.push(std::move(message));\n"
                "  guard.unlock();\n  WakeBackgroundThread(wakes_other_ranks);\n  return Status::OK();\n",
            ),
            Edit(
                file="horovod/common/tensor_queue.cc",
                before="std::vector<Request>& messages) {\n  std::lock_guard<std::mutex> guard(mutex_);\n",
                after="std::vector<Request>& messages) {\n"
                "  bool wakes_other_ranks = !entries.empty() && entries[0].process_set_id != 0;\n"
                "  std::unique_lock<std::mutex> guard(mutex_);\n",
            ),
            Edit(
                file="horovod/common/tensor_queue.cc",
                before="    message_queue_.push(std::move(messages[i]));\n  }\n  return Status::OK();\n",
                after="    message_queue_.push(std::move(messages[i]));\n  }\n"
                "  guard.unlock();\n  WakeBackgroundThread(wakes_other_ranks);\n  return Status::OK();\n",
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
    PROCESS_SETS,
    Patch(
        name="repeated-init",
        kind="fix",
        reason="When all ranks have read the addresses of one scope, horovodrun's rendezvous server forgets which "
        "ranks have read those of other scopes. It never removes the addresses of the other scopes, so the next "
        "hvd.init() reads them and fails.",
        edits=(
            Edit(
                file="horovod/runner/http/http_server.py",
                before="                        self.server.finished_list.clear()\n",
                after="                        del self.server.finished_list[scope]\n",
            ),
        ),
    ),
    Patch(
        name="repeated-settings",
        kind="fix",
        reason="If HOROVOD_FUSION_THRESHOLD and HOROVOD_CYCLE_TIME are set, the second hvd.init() of a process ends "
        "with a segmentation fault. Horovod assigns its default values to elements that the first call has removed "
        "from a vector. If only one variable is set, Horovod changes the other setting.",
        edits=(
            Edit(
                file="horovod/common/parameter_manager.cc",
                before="    fixed_values_[variable] = value;\n    ResetBayes();\n  } else {\n",
                after="    fixed_values_[variable] = value;\n    ResetBayes();\n"
                "  } else if (fixed_values_.find(variable) == fixed_values_.end()) {\n",
            ),
        ),
    ),
    Patch(
        name="mpi-signals",
        kind="fix",
        reason="horovodrun --mpi replaces itself with a shell that waits for mpirun. The SIGTERM of a scheduler ends "
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
