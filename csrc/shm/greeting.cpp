#include "greeting.h"

#include <sys/stat.h>

#include <sstream>

#include "../process.h"

namespace pycomm {

std::string host_name() {
  char name[256] = "";
  gethostname(name, sizeof name - 1);
  return *name ? name : "-";
}

std::string place() {
  const std::string boot = boot_id();
  struct stat status;
  if (boot.empty() || stat("/proc/self/ns/net", &status) != 0) return "-";
  return concat(boot, ":", status.st_ino);
}

std::string Address::text() const {
  return concat(name, " ", secret, " ", nonce, " ", place, " ", host);
}

Address Address::parse(const std::string& text, int rank) {
  Address address;
  std::istringstream fields(text);
  fields >> address.name >> address.secret >> address.nonce >> address.place >> address.host;
  PYCOMM_CHECK(!fields.fail() && address.secret.size() == kSecretBytes && address.name.size() < 100,
               kError, "rank ", rank, ": what rank 0 is said to offer is no address, but ",
               text.size(),
               " bytes of something else; does another program, or another version of ",
               "pycomm, use this Store?");
  return address;
}

}  // namespace pycomm
