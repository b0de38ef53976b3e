// Where the ranks of a group write what the others may read: the job's Store, as the core sees
// it.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>

namespace pycomm {

class Board {
 public:
  virtual ~Board() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;
  // What is written there, or nothing. Does not wait.
  virtual std::optional<std::string> get(const std::string& key) = 0;
  // Writes it unless something is there already; returns what is there then.
  virtual std::string set_first(const std::string& key, const std::string& value) = 0;
};

// A part of another one.
class PrefixBoard : public Board {
 public:
  PrefixBoard(std::shared_ptr<Board> board, std::string prefix)
      : board_(std::move(board)), prefix_(std::move(prefix)) {}
  void set(const std::string& key, const std::string& value) override {
    board_->set(prefix_ + key, value);
  }
  std::optional<std::string> get(const std::string& key) override {
    return board_->get(prefix_ + key);
  }
  std::string set_first(const std::string& key, const std::string& value) override {
    return board_->set_first(prefix_ + key, value);
  }

 private:
  const std::shared_ptr<Board> board_;
  const std::string prefix_;
};

}  // namespace pycomm
