#include "client/tool/flags.h"

#include <algorithm>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace attnd::tool {

void FlagSet::String(const std::string& name, std::string* value, const std::string& help) {
  flags_.push_back({name, "TEXT", *value, help, [value](const std::string& text) {
                      *value = text;
                      return absl::OkStatus();
                    }});
}

void FlagSet::Int(const std::string& name, int64_t* value, int64_t least, int64_t most, const std::string& help) {
  auto set = [=](const std::string& text) {
    int64_t number = 0;
    if (!absl::SimpleAtoi(text, &number)) {
      return absl::InvalidArgumentError(absl::StrCat("--", name, ": '", text, "' is not a whole number"));
    }
    if (number < least || number > most) {
      return absl::InvalidArgumentError(absl::StrCat("--", name, ": ", number, " is not in ", least, "..", most));
    }
    *value = number;
    return absl::OkStatus();
  };
  flags_.push_back({name, "N", absl::StrCat(*value), help, set});
}

void FlagSet::Number(const std::string& name, double* value, double least, double most, const std::string& help) {
  auto set = [=](const std::string& text) {
    double number = 0;
    if (!absl::SimpleAtod(text, &number)) {
      return absl::InvalidArgumentError(absl::StrCat("--", name, ": '", text, "' is not a number"));
    }
    if (!(number >= least && number <= most)) {  // so that NaN is refused
      return absl::InvalidArgumentError(absl::StrCat("--", name, ": ", text, " is not in ", least, "..", most));
    }
    *value = number;
    return absl::OkStatus();
  };
  flags_.push_back({name, "NUMBER", absl::StrCat(*value), help, set});
}

void FlagSet::Seconds(const std::string& name, absl::Duration* value, const std::string& help, bool zero) {
  auto set = [=](const std::string& text) {
    absl::Duration duration;
    const bool parsed = absl::ParseDuration(text, &duration);
    if (!parsed || duration < absl::ZeroDuration() || (!zero && duration == absl::ZeroDuration())) {
      return absl::InvalidArgumentError(absl::StrCat("--", name, ": '", text, "' is not a ", zero ? "" : "positive ",
                                                     "duration such as 30s or 500ms"));
    }
    *value = duration;
    return absl::OkStatus();
  };
  flags_.push_back({name, "DURATION", absl::FormatDuration(*value), help, set});
}

void FlagSet::Switch(const std::string& name, bool* value, const std::string& help) {
  auto set = [=](const std::string& text) {
    if (text != "true" && text != "false") {
      return absl::InvalidArgumentError(absl::StrCat("--", name, ": '", text, "' is neither true nor false"));
    }
    *value = text == "true";
    return absl::OkStatus();
  };
  flags_.push_back({name, "", *value ? "true" : "", help, set});
}

void FlagSet::Choice(const std::string& name, std::string* value, const std::vector<std::string>& names,
                     const std::string& help) {
  auto set = [=](const std::string& text) {
    if (std::find(names.begin(), names.end(), text) == names.end()) {
      return absl::InvalidArgumentError(
          absl::StrCat("--", name, ": '", text, "' is not one of ", absl::StrJoin(names, ", ")));
    }
    *value = text;
    return absl::OkStatus();
  };
  flags_.push_back({name, absl::StrJoin(names, "|"), *value, help, set});
}

FlagSet::Flag* FlagSet::Find(const std::string& name) {
  auto flag = std::find_if(flags_.begin(), flags_.end(), [&](const Flag& f) { return f.name == name; });
  return flag == flags_.end() ? nullptr : &*flag;
}

absl::Status FlagSet::Parse(const std::vector<std::string>& arguments, std::vector<std::string>* positional) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    const std::string& argument = arguments[i];
    if (argument == "--help" || argument == "-h") {
      help_wanted_ = true;
      return absl::OkStatus();
    }
    if (argument.size() < 2 || argument[0] != '-') {  // "-" alone is a file name: standard input
      if (positional == nullptr)
        return absl::InvalidArgumentError(absl::StrCat("unexpected argument '", argument, "'"));
      positional->push_back(argument);
      continue;
    }
    const size_t equals = argument.find('=');
    const size_t dashes = argument.rfind("--", 0) == 0 ? 2 : 1;
    Flag* flag = dashes == 2 ? Find(argument.substr(2, equals == std::string::npos ? equals : equals - 2)) : nullptr;
    if (flag == nullptr) return absl::InvalidArgumentError(absl::StrCat("unknown flag '", argument, "'"));
    std::string value = "true";
    if (equals != std::string::npos) {
      value = argument.substr(equals + 1);
    } else if (!flag->value_hint.empty()) {
      if (++i == arguments.size()) return absl::InvalidArgumentError(absl::StrCat("--", flag->name, " needs a value"));
      value = arguments[i];
    }
    absl::Status status = flag->set(value);
    if (!status.ok()) return status;
    flag->given = value;
  }
  return absl::OkStatus();
}

std::vector<std::pair<std::string, std::string>> FlagSet::Values() const {
  std::vector<std::pair<std::string, std::string>> values;
  for (const Flag& flag : flags_) {
    const bool off = flag.value_hint.empty() && flag.given.empty() && flag.default_value.empty();
    values.emplace_back(flag.name, off ? "false" : flag.given.empty() ? flag.default_value : flag.given);
  }
  return values;
}

std::string FlagSet::Help() const {
  std::string help = absl::StrCat("usage: ", synopsis_, "\n\n", summary_, "\n");
  if (!flags_.empty()) help += "\nFlags\n";
  for (const Flag& flag : flags_) {
    std::string left = absl::StrCat("  --", flag.name, flag.value_hint.empty() ? "" : "=", flag.value_hint);
    // A description that does not fit beside its flag starts on a line of its own.
    constexpr size_t kColumn = 28;
    if (left.size() + 2 > kColumn) {
      absl::StrAppend(&left, "\n", std::string(kColumn, ' '));
    } else {
      left.resize(kColumn, ' ');
    }
    absl::StrAppend(&help, left, flag.help);
    if (!flag.default_value.empty()) absl::StrAppend(&help, " (default ", flag.default_value, ")");
    help += '\n';
  }
  return help;
}

}  // namespace attnd::tool
