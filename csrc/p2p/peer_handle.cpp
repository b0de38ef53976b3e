#include "peer_handle.h"

#include <random>
#include <sstream>

#include "../error.h"
#include "../hex.h"
#include "../process.h"

namespace pycomm {
namespace {

constexpr char kFirstWord[] = "pycomm-peer-1";  // with the format's version

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
  handle.host = boot_id();
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
