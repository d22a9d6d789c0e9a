// Command-line flags of a command or subcommand: typed, with ranges; an unknown flag or a bad value is an error that
// names it. Written as --name=value, --name value, or --name for a switch.
#ifndef ATTND_CLIENT_TOOL_FLAGS_H_
#define ATTND_CLIENT_TOOL_FLAGS_H_

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace attnd::tool {

class FlagSet {
 public:
  // `synopsis` is the first line of the help, from the program's name on; `summary` is its paragraph.
  FlagSet(std::string synopsis, std::string summary) : synopsis_(std::move(synopsis)), summary_(std::move(summary)) {}

  // Each takes where the value goes, which holds the default and must outlive Parse.
  void String(const std::string& name, std::string* value, const std::string& help);
  void Int(const std::string& name, int64_t* value, int64_t least, int64_t most, const std::string& help);
  void Number(const std::string& name, double* value, double least, double most, const std::string& help);
  // "30s", "500ms": positive, or with `zero` also "0".
  void Seconds(const std::string& name, absl::Duration* value, const std::string& help, bool zero = false);
  void Switch(const std::string& name, bool* value, const std::string& help);
  // One of the names; `value` holds one of them.
  void Choice(const std::string& name, std::string* value, const std::vector<std::string>& names,
              const std::string& help);

  // INVALID_ARGUMENT with the sentence to print. `positional` receives what is not a flag; null: nothing may be.
  absl::Status Parse(const std::vector<std::string>& arguments, std::vector<std::string>* positional);

  // --help was among the arguments: print Help() and succeed.
  bool help_wanted() const { return help_wanted_; }
  std::string Help() const;
  // Every flag's name and the text that it has: its default's, or what was given last.
  std::vector<std::pair<std::string, std::string>> Values() const;

 private:
  struct Flag {
    std::string name;
    std::string value_hint;  // empty: a switch
    std::string default_value;
    std::string help;
    std::function<absl::Status(const std::string&)> set;
    std::string given = {};  // empty: the default is in force
  };
  Flag* Find(const std::string& name);

  std::string synopsis_;
  std::string summary_;
  std::vector<Flag> flags_;
  bool help_wanted_ = false;
};

}  // namespace attnd::tool

#endif  // ATTND_CLIENT_TOOL_FLAGS_H_
