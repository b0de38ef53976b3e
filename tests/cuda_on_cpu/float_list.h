// Lists of tensors for tests of the codec's kernels: of one dtype or of several, each somewhere in
// memory of its own, which ends with it. Behind cuda_on_cpu.h.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "../../csrc/kernels/codec_cuda.h"
#include "checks.h"

namespace checks {

template <class T>
T element_of(float value) {
  if constexpr (std::is_same_v<T, Half>)
    return T{cuda_on_cpu::Binary16::narrow(value)};
  else if constexpr (std::is_same_v<T, BFloat16>)
    return T{cuda_on_cpu::Brain16::narrow(value)};
  else
    return value;
}

// Calls visit(pointer to the tensor's first element), of its own type.
template <class Visit>
void visit_elements(const FloatSpan& span, Visit&& visit) {
  if (span.dtype == DType::kFloat16)
    visit(static_cast<Half*>(span.data));
  else if (span.dtype == DType::kBFloat16)
    visit(static_cast<BFloat16*>(span.data));
  else
    visit(static_cast<float*>(span.data));
}

class FloatList {
 public:
  FloatList() = default;
  // Other memory with the same sizes and offsets, and the same in it.
  FloatList(const FloatList& other) {
    for (const FloatSpan& span : other.spans_) {
      const auto offset = reinterpret_cast<uintptr_t>(span.data) % kAlignment;
      if (span.data)
        add(span.count, span.dtype, static_cast<unsigned>(offset / bytes(span.dtype)));
      else
        add_gap(span.count, span.dtype);
    }
    assign(other);
  }
  FloatList& operator=(const FloatList&) = delete;
  FloatList(FloatList&&) = default;

  // `offset`: of elements from an aligned address.
  void add(int64_t count, DType dtype, unsigned offset) {
    const auto size = static_cast<int64_t>(bytes(dtype));
    memory_.emplace_back((count + offset) * size);
    spans_.push_back({memory_.back().data() + offset * size, count, dtype});
  }
  // Elements that nobody reads or writes.
  void add_gap(int64_t count, DType dtype) { spans_.push_back({nullptr, count, dtype}); }

  // next() gives the value of each element.
  template <class Next>
  void fill(Next&& next) {
    for (const FloatSpan& span : spans_)
      if (span.data)
        visit_elements(span, [&](auto* to) {
          for (int64_t at = 0; at < span.count; ++at)
            to[at] = element_of<std::remove_pointer_t<decltype(to)>>(next());
        });
  }
  void assign(const FloatList& other) {
    for (size_t at = 0; at < spans_.size(); ++at)
      if (spans_[at].data && spans_[at].count > 0)
        std::memcpy(spans_[at].data, other.spans_[at].data,
                    static_cast<size_t>(spans_[at].count) * bytes(spans_[at].dtype));
  }
  // Of a list that is divided in the same way.
  bool equals(const FloatList& other) const { return differences(other) == 0; }
  int64_t differences(const FloatList& other) const {
    const std::vector<Element> mine = elements(), theirs = other.elements();
    int64_t number = mine.size() != theirs.size();
    for (size_t at = 0; at < std::min(mine.size(), theirs.size()); ++at)
      number += !same(mine[at], theirs[at]);
    return number;
  }

  struct Element {
    DType dtype;
    uint32_t bits;
    friend bool operator==(const Element& a, const Element& b) {
      return a.dtype == b.dtype && a.bits == b.bits;
    }
  };
  std::vector<Element> elements() const {
    std::vector<Element> all;
    for (const FloatSpan& span : spans_)
      if (span.data)
        visit_elements(span, [&](const auto* from) {
          for (int64_t at = 0; at < span.count; ++at) {
            Element element{span.dtype, 0};
            std::memcpy(&element.bits, from + at, sizeof *from);
            all.push_back(element);
          }
        });
    return all;
  }
  // As checks.h: same().
  static bool same(const Element& a, const Element& b) {
    return a == b || (a.dtype == b.dtype && is_nan(a) && is_nan(b));
  }

  const std::vector<FloatSpan>& spans() const { return spans_; }
  DeviceSpans on_device() {
    const auto count = static_cast<int>(spans_.size());
    if (count == 1) return {1, {spans_[0].data, 0, spans_[0].dtype}, nullptr};
    list_.resize(spans_.size() + 1);
    fill_device_spans(spans_.data(), count, list_.data());
    return {count, {}, list_.data()};
  }

 private:
  static constexpr uintptr_t kAlignment = 256;  // Array's

  static size_t bytes(DType dtype) { return static_cast<size_t>(bytes_of(dtype)); }
  static bool is_nan(const Element& element) {
    const uint32_t bits = element.bits;
    switch (element.dtype) {
      case DType::kFloat16:
        return (bits & 0x7fff) > 0x7c00;
      case DType::kBFloat16:
        return (bits & 0x7fff) > 0x7f80;
      default:
        return (bits & 0x7fffffff) > 0x7f800000;
    }
  }

  std::vector<Array<char>> memory_;
  std::vector<FloatSpan> spans_;
  std::vector<DeviceSpan> list_;
};

}  // namespace checks
