// Where in the user's program a call came from: "train.py:88 in step". The bindings set how to find
// it; without them it is unknown.
#pragma once

#include <functional>
#include <string>

namespace pycomm {

// When it is looked for: of queued operations while they are queued and of others only if they
// fail (kAuto), of every operation (kAlways, some 0.3 us each), or not at all.
enum class CallSites { kAuto, kAlways, kNever };

inline std::function<std::string()>& call_site_hook() {
  static std::function<std::string()> hook;
  return hook;
}
inline CallSites& call_sites() {
  static CallSites setting = CallSites::kAuto;
  return setting;
}
// Of the calling thread; empty if it runs no Python code of the user's.
inline std::string find_call_site() {
  return call_site_hook() && call_sites() != CallSites::kNever ? call_site_hook()() : std::string();
}

}  // namespace pycomm
