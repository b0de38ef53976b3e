#include "peer_handle.h"

#include <fstream>
#include <random>
#include <sstream>

#include "../error.h"

namespace pycomm {
namespace {

constexpr char kFirstWord[] = "pycomm-peer-1";  // with the format's version

std::string to_hex(const unsigned char* bytes, int count) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (int at = 0; at < count; ++at) {
    text += kDigits[bytes[at] >> 4];
    text += kDigits[bytes[at] & 15];
  }
  return text;
}
bool from_hex(const std::string& text, unsigned char* bytes, int count) {
  if (text.size() != 2 * static_cast<size_t>(count) ||
      text.find_first_not_of("0123456789abcdef") != std::string::npos)
    return false;
  for (int at = 0; at < count; ++at)
    bytes[at] = static_cast<unsigned char>(
        std::stoi(text.substr(2 * static_cast<size_t>(at), 2), nullptr, 16));
  return true;
}

}  // namespace

std::string PeerHandle::text() const {
  std::ostringstream text;
  text << kFirstWord << ' ' << host << ' ' << process << ' ' << address << ' ' << device << ' '
       << layout.blocks << ' ' << layout.slots << ' ' << layout.slot_bytes << ' '
       << to_hex(ipc, kIpcBytes);
  return text.str();
}

PeerHandle PeerHandle::parse(const std::string& text) {
  std::istringstream words(text);
  PeerHandle handle;
  std::string first, ipc, more;
  words >> first >> handle.host >> handle.process >> handle.address >> handle.device >>
      handle.layout.blocks >> handle.layout.slots >> handle.layout.slot_bytes >> ipc;
  PYCOMM_CHECK(
      words && first == kFirstWord && from_hex(ipc, handle.ipc, kIpcBytes) && !(words >> more),
      kInvalidArgument,
      "this is no handle of peer memory, or one of another version of "
      "pycomm: '",
      text.substr(0, 40), "'");
  return handle;
}

PeerHandle PeerHandle::here() {
  PeerHandle handle;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> handle.host;
  if (handle.host.empty()) handle.host = "unknown";
  static const int64_t kProcess = [] {
    std::random_device chance;
    return static_cast<int64_t>(chance()) << 31 ^ chance();
  }();
  handle.process = kProcess;
  return handle;
}

std::string why_not_mapped(const PeerHandle& mine, const PeerHandle& theirs) {
  if (theirs.host != mine.host) return "it is on another host";
  const PeerLayout &a = mine.layout, &b = theirs.layout;
  if (a.blocks != b.blocks || a.slots != b.slots || a.slot_bytes != b.slot_bytes)
    return concat("its memory has ", b.blocks, " blocks with ", b.slots, " slots of ", b.slot_bytes,
                  " bytes, this rank's has ", a.blocks, " with ", a.slots, " of ", a.slot_bytes);
  return "";
}

}  // namespace pycomm
