"""The patch that lets the members of a process set create and remove the process set while Horovod runs, without a call
on other ranks."""

from __future__ import annotations

from textwrap import indent

from unitrain.horovod_wheel.patching import Edit, Patch

_GLOO_WAKER = """\
// Wakes the sleeping background threads of all ranks, over the connections of
// the global context. A rank sends a message to the ranks at distances 1, 2, 4
// and so on; a receiver forwards it to the distances below that of its sender,
// so each rank sends O(log(size)) messages.
class GlooWaker {
public:
  // All ranks create it. `wake` is called for each received message.
  GlooWaker(std::shared_ptr<gloo::Context> context, std::function<void()> wake);

  ~GlooWaker();

  // Wake all other ranks, without waiting.
  void WakeOtherRanks();

  // Return false if a connection has been lost.
  bool IsConnected() const { return is_connected_; }

private:
  void Receive(int level);

  void Send();

  void RequestLevels(int levels);

  std::shared_ptr<gloo::Context> context_;
  std::function<void()> wake_;
  char sent_ = 0;
  std::vector<char> received_;
  std::unique_ptr<gloo::transport::UnboundBuffer> sender_buffer_;
  std::vector<std::unique_ptr<gloo::transport::UnboundBuffer>>
      receiver_buffers_;
  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable condition_;
  int requested_levels_ = 0;
  bool is_stopping_ = false;
  std::atomic_bool is_connected_{true};
};

"""
_GLOO_WAKER_METHODS = """\
namespace {

// Different from the slots of Gloo's collectives.
constexpr uint64_t kWakeSlot = 0xffull << 56;
// Without a limit. The largest possible duration would overflow.
constexpr auto kNoTimeout =
    std::chrono::milliseconds(std::chrono::hours(24 * 365 * 10));

} // namespace

GlooWaker::GlooWaker(std::shared_ptr<gloo::Context> context,
                     std::function<void()> wake)
    : context_(std::move(context)), wake_(std::move(wake)) {
  int levels = 0;
  while ((1 << levels) < context_->size) {
    ++levels;
  }
  received_.resize(levels);
  sender_buffer_ = context_->createUnboundBuffer(&sent_, 1);
  for (int level = 0; level < levels; ++level) {
    receiver_buffers_.push_back(
        context_->createUnboundBuffer(&received_[level], 1));
  }
  threads_.emplace_back(&GlooWaker::Send, this);
  for (int level = 0; level < levels; ++level) {
    threads_.emplace_back(&GlooWaker::Receive, this, level);
  }
}

GlooWaker::~GlooWaker() {
  {
    std::lock_guard<std::mutex> guard(mutex_);
    is_stopping_ = true;
  }
  condition_.notify_one();
  sender_buffer_->abortWaitSend();
  for (auto& buffer : receiver_buffers_) {
    buffer->abortWaitRecv();
  }
  for (auto& thread : threads_) {
    thread.join();
  }
}

void GlooWaker::WakeOtherRanks() { RequestLevels((int)received_.size()); }

void GlooWaker::RequestLevels(int levels) {
  {
    std::lock_guard<std::mutex> guard(mutex_);
    requested_levels_ = std::max(requested_levels_, levels);
  }
  condition_.notify_one();
}

void GlooWaker::Receive(int level) {
  auto& buffer = receiver_buffers_[level];
  int source = (context_->rank - (1 << level) + context_->size) % context_->size;
  try {
    buffer->recv(source, kWakeSlot);
    while (buffer->waitRecv(kNoTimeout)) {
      buffer->recv(source, kWakeSlot);
      wake_();
      RequestLevels(level);
    }
  } catch (const std::exception& error) {
    is_connected_ = false;
  }
}

void GlooWaker::Send() {
  try {
    while (true) {
      int levels;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        condition_.wait(lock,
                        [this] { return is_stopping_ || requested_levels_; });
        if (is_stopping_) {
          return;
        }
        levels = requested_levels_;
        requested_levels_ = 0;
      }
      for (int level = levels - 1; level >= 0; --level) {
        int destination = (context_->rank + (1 << level)) % context_->size;
        sender_buffer_->send(destination, kWakeSlot);
      }
      for (int level = 0; level < levels; ++level) {
        if (!sender_buffer_->waitSend(kNoTimeout)) {
          return;
        }
      }
    }
  } catch (const std::exception& error) {
    is_connected_ = false;
  }
}

"""
_EXCHANGE_REQUESTS = """\
namespace {

// Wakes ranks that are not members of a process set when its members enqueue
// operations. It exists from the creation of the first process set until
// shutdown.
#if HAVE_GLOO
GlooWaker* gloo_waker = nullptr;
#endif // HAVE_GLOO

bool CanWakeOtherRanks() {
#if HAVE_GLOO
  return gloo_waker != nullptr && gloo_waker->IsConnected();
#else
  return false;
#endif // HAVE_GLOO
}

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
        if (gloo_waker == nullptr && state.idle_cycle_ms > 0) {
          gloo_waker = new GlooWaker(global_gloo_context.ctx, [] {
            TensorQueue::WakeBackgroundThread(false);
          });
          TensorQueue::SetWakeOtherRanks([] { gloo_waker->WakeOtherRanks(); });
        }
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

_NEGOTIATED_REMOVAL = """\
    while (true) {
      InitializeRegisteredAndRemoveMarkedIfReady_(context, status);
      if (ProcessSetHasJustBeenRemoved()) {
        break;
      } else {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    }
"""
_REMOVAL_AFTER_FAILURE = f"""\
    try {{
{indent(_NEGOTIATED_REMOVAL, "  ")}    }} catch (const std::exception& error) {{
      // Another process has terminated. An exception in the background thread
      // would terminate this process too.
      id_to_be_removed_ = NO_PENDING_REMOVAL;
      Get(id).Finalize(status);
      DeregisterProcessSet(id);
    }}
"""

PROCESS_SETS = Patch(
    name="process-sets",
    kind="fix",
    reason="All ranks must add a process set at the same time, and with HOROVOD_DYNAMIC_PROCESS_SETS, every cycle "
    "contains one more allgather. With horovod_request_process_set, only the members of a process set take part, "
    "a cycle in which no process set is requested or used costs nothing, and over Gloo, ranks that are not members "
    "sleep until the members wake them. After another rank has been killed, a rank with process sets raises "
    "HorovodInternalError instead of being aborted.",
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
            file="horovod/common/gloo/gloo_context.h",
            before='#include "gloo/context.h"\n',
            after="#include <atomic>\n#include <condition_variable>\n#include <functional>\n"
            "#include <memory>\n#include <mutex>\n#include <thread>\n#include <vector>\n\n"
            '#include "gloo/context.h"\n#include "gloo/transport/unbound_buffer.h"\n',
        ),
        Edit(
            file="horovod/common/gloo/gloo_context.h",
            before="} // namespace common\n} // namespace horovod\n\n#endif // HOROVOD_GLOO_CONTEXT_H\n",
            after=_GLOO_WAKER + "} // namespace common\n} // namespace horovod\n\n#endif // HOROVOD_GLOO_CONTEXT_H\n",
        ),
        Edit(
            file="horovod/common/gloo/gloo_context.cc",
            before="void GlooContext::Finalize() {\n",
            after=_GLOO_WAKER_METHODS + "void GlooContext::Finalize() {\n",
        ),
        Edit(
            file="horovod/common/operations.cc",
            before="#if HAVE_GLOO\n  global_gloo_context.Finalize();\n",
            after="#if HAVE_GLOO\n  TensorQueue::SetWakeOtherRanks(nullptr);\n  delete gloo_waker;\n"
            "  gloo_waker = nullptr;\n  global_gloo_context.Finalize();\n",
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
            file="horovod/common/process_set.cc",
            before=_NEGOTIATED_REMOVAL,
            after=_REMOVAL_AFTER_FAILURE,
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
)
