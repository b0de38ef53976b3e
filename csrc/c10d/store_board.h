// torch's Store as a board of the core's, whose threads use it without the GIL.
#pragma once

#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>
#include <vector>

#include "../board.h"
#include "../error.h"

namespace pycomm {

class StoreBoard : public Board {
 public:
  explicit StoreBoard(const c10::intrusive_ptr<c10d::Store>& store) : store_(own(store)) {}

  void set(const std::string& key, const std::string& value) override {
    told([&] { store_->set(kPrefix + key, bytes(value)); });
  }
  std::optional<std::string> get(const std::string& key) override {
    return told([&]() -> std::optional<std::string> {
      if (!store_->check({kPrefix + key})) return {};
      return text(store_->get(kPrefix + key));
    });
  }
  std::string set_first(const std::string& key, const std::string& value) override {
    return told([&] { return text(store_->compareSet(kPrefix + key, {}, bytes(value))); });
  }

 private:
  inline static const std::string kPrefix = "pycomm/nccl/";

  // A connection of its own, where the Store has connections: one that somebody else waits on would
  // not answer. A Store written in Python may not know how to be cloned.
  static c10::intrusive_ptr<c10d::Store> own(const c10::intrusive_ptr<c10d::Store>& store) {
    try {
      return store->clone();
    } catch (const std::exception&) {
      return store;
    }
  }
  static std::vector<uint8_t> bytes(const std::string& text) { return {text.begin(), text.end()}; }
  static std::string text(const std::vector<uint8_t>& bytes) {
    return {bytes.begin(), bytes.end()};
  }
  template <class Function>
  static auto told(Function&& function) -> decltype(function()) {
    try {
      return function();
    } catch (const std::exception& error) {
      throw Error(ErrorKind::kError, concat("the Store failed: ", error.what()));
    }
  }

  const c10::intrusive_ptr<c10d::Store> store_;
};

}  // namespace pycomm
