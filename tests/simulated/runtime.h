// Queues of work and memory of the simulated devices. Nothing here knows of tensors.
//
// Note: Addresses of device memory
//     Device memory is host memory. Torch gets the true address plus kShift, which is in no page of a process,
//     so a host that reads device memory dies. Only work in a queue uses true addresses.
//
// Note: Freed memory is reused at once
//     A block belongs to the queue that was current when it was allocated. A freed block is the next one that
//     this queue hands out, and the queue overwrites its bytes. Earlier work of the same queue is safe. Another
//     queue that still uses the block reads and writes memory of the next owner, unless the block was recorded
//     on that queue.
//
// Note: Freed page-locked memory waits for its copies
//     It is handed out again after its known copies: of tensors whose storage it is, or whose elements start
//     at its address. A copy of a view that torch did not make is not known.
#pragma once

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <queue>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace simulated {

constexpr int kDevices = 2;
constexpr int kQueues = 33;  // of a device: the default one, and those that are handed out in turn
constexpr uintptr_t kShift = uintptr_t{1} << 55;
constexpr int kPattern = 0xFF;  // NaN, or -1
constexpr std::chrono::seconds kLimit{60};

// How long each operation waits before it runs: mostly not at all.
class Delays {
 public:
  void set(double most, uint64_t seed) {
    std::lock_guard lock(mutex_);
    most_ = most;
    draw_.seed(seed);
  }

  std::chrono::duration<double> next() {
    std::lock_guard lock(mutex_);
    if (most_ == 0 || draw_() % 4 != 0) return {};
    return std::chrono::duration<double>(std::uniform_real_distribution<>(0, most_)(draw_));
  }

 private:
  std::mutex mutex_;
  double most_ = 0;
  std::mt19937_64 draw_;
};

inline Delays& delays() {
  static auto* all = new Delays;
  return *all;
}

// Work that runs in order on a thread of its own.
class Queue {
 public:
  // Returns the number of the work, from 1.
  uint64_t enqueue(std::function<void()> work) {
    std::lock_guard lock(mutex_);
    if (!started_) {
      started_ = true;
      std::thread([this] { run(); }).detach();
    }
    waiting_.push(std::move(work));
    changed_.notify_all();
    return ++enqueued_;
  }

  uint64_t enqueued() {
    std::lock_guard lock(mutex_);
    return enqueued_;
  }

  bool reached(uint64_t number) {
    std::lock_guard lock(mutex_);
    return done_ >= number;
  }

  void await(uint64_t number) {
    std::unique_lock lock(mutex_);
    if (!changed_.wait_for(lock, kLimit, [&] { return done_ >= number; }))
      throw std::runtime_error("a queue of the simulated device did not get on: is it held?");
  }

  // The host's wait also raises the error of failed work.
  void synchronize(uint64_t number) {
    await(number);
    std::lock_guard lock(mutex_);
    if (!error_.empty()) throw std::runtime_error("on the simulated device: " + std::exchange(error_, ""));
  }

  void hold(bool held) {
    std::lock_guard lock(mutex_);
    held_ = held;
    changed_.notify_all();
  }

 private:
  void run() {
    for (;;) {
      std::function<void()> work;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return !held_ && !waiting_.empty(); });
        work = std::move(waiting_.front());
        waiting_.pop();
      }
      const auto delay = delays().next();
      if (delay.count() > 0) std::this_thread::sleep_for(delay);
      std::string error;
      try {
        work();
      } catch (const std::exception& failure) {
        error = failure.what();
      }
      work = nullptr;
      std::lock_guard lock(mutex_);
      if (error_.empty()) error_ = error;
      ++done_;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::queue<std::function<void()>> waiting_;
  uint64_t enqueued_ = 0, done_ = 0;
  bool started_ = false, held_ = false;
  std::string error_;
};

// Queues are never destroyed: their threads, and memory that is freed last, outlive everything.
inline Queue& queue(int device, int64_t number) {
  static auto* all = new std::array<std::array<Queue, kQueues>, kDevices>;
  return all->at(device).at(number);
}

// A place in a queue, after all work that was enqueued before.
struct Mark {
  Queue* of = nullptr;
  uint64_t number = 0;

  static Mark now(Queue& of) { return {&of, of.enqueued()}; }
  bool reached() const { return of == nullptr || of->reached(number); }
  void block(Queue& other) const {
    if (of != nullptr && of != &other) other.enqueue([mark = *this] { mark.of->await(mark.number); });
  }
};

inline bool all_reached(const std::vector<Mark>& marks) {
  for (const auto& mark : marks)
    if (!mark.reached()) return false;
  return true;
}

struct Block {
  void* memory;
  size_t size;
  Queue* owner;
  std::vector<Queue*> users;  // other queues it was recorded on
};

inline size_t rounded(size_t nbytes, size_t least) {
  while (least < nbytes) least *= 2;
  return least;
}

inline void* pages(size_t size) {
  void* memory = std::aligned_alloc(4096, rounded(size, 4096));
  if (memory == nullptr) throw std::bad_alloc();
  std::memset(memory, kPattern, size);
  return memory;
}

// See "Freed memory is reused at once".
class DeviceMemory {
 public:
  Block* take(size_t nbytes, Queue& owner) {
    std::lock_guard lock(mutex_);
    collect();
    const auto size = rounded(nbytes, 512);
    auto& free = free_[{&owner, size}];
    if (free.empty()) return new Block{pages(size), size, &owner, {}};
    auto* block = free.back();
    free.pop_back();
    return block;
  }

  void record(Block* block, Queue& user) {
    std::lock_guard lock(mutex_);
    if (&user != block->owner) block->users.push_back(&user);
  }

  void give(Block* block) {
    std::lock_guard lock(mutex_);
    std::vector<Mark> marks;
    for (auto* user : block->users) marks.push_back(Mark::now(*user));
    block->users.clear();
    recorded_.emplace_back(block, std::move(marks));
    collect();
  }

 private:
  void collect() {
    std::erase_if(recorded_, [&](const auto& item) {
      auto* block = item.first;
      if (!all_reached(item.second)) return false;
      block->owner->enqueue([block] { std::memset(block->memory, kPattern, block->size); });
      free_[{block->owner, block->size}].push_back(block);
      return true;
    });
  }

  std::mutex mutex_;
  std::map<std::pair<Queue*, size_t>, std::vector<Block*>> free_;
  std::vector<std::pair<Block*, std::vector<Mark>>> recorded_;
};

inline DeviceMemory& device_memory() {
  static auto* all = new DeviceMemory;
  return *all;
}

// See "Freed page-locked memory waits for its copies".
class PinnedMemory {
 public:
  void* take(size_t nbytes) {
    std::lock_guard lock(mutex_);
    const auto size = rounded(nbytes, 512);
    for (auto at = free_.size(); at-- > 0;) {  // the last one first
      const auto found = free_[at];
      auto& block = blocks_.at(found);
      if (block.size != size || !all_reached(block.copies)) continue;
      block.copies.clear();
      free_.erase(free_.begin() + at);
      return reinterpret_cast<void*>(found);
    }
    auto* memory = pages(size);
    blocks_[address(memory)] = {size, {}};
    return memory;
  }

  void give(void* memory) {
    std::lock_guard lock(mutex_);
    free_.push_back(address(memory));
  }

  // Records a copy that was just enqueued. Returns true if the memory is the start of a block.
  bool record(const void* memory, Queue& user) {
    std::lock_guard lock(mutex_);
    const auto block = blocks_.find(address(memory));
    if (block == blocks_.end()) return false;
    block->second.copies.push_back(Mark::now(user));
    return true;
  }

  bool holds(const void* inside) {
    std::lock_guard lock(mutex_);
    const auto after = blocks_.upper_bound(address(inside));
    if (after == blocks_.begin()) return false;
    const auto& [start, block] = *std::prev(after);
    return address(inside) < start + block.size;
  }

 private:
  struct Pinned {
    size_t size;
    std::vector<Mark> copies;
  };

  static uintptr_t address(const void* memory) { return reinterpret_cast<uintptr_t>(memory); }

  std::mutex mutex_;
  std::map<uintptr_t, Pinned> blocks_;
  std::vector<uintptr_t> free_;
};

inline PinnedMemory& pinned_memory() {
  static auto* all = new PinnedMemory;
  return *all;
}

}  // namespace simulated
