// consumer HOST:PORT: two steps of a session. All keys are zero, so that an output is the mean of the values so far.
#include <cmath>
#include <iostream>
#include <vector>

#include "attnd/client.h"

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  const auto client = attnd::Client::Connect({.target = argv[1]});
  if (!client.ok()) return std::cerr << client.status() << "\n", 1;
  auto session = client->CreateSession({.num_layers = 1, .num_q_heads = 2, .num_kv_heads = 1, .head_dim = 1});
  if (!session.ok()) return std::cerr << session.status() << "\n", 1;
  session->set_close_on_destroy(true);

  const std::vector<float> keys(2);
  std::vector<float> out(4);
  // Two tokens, two query heads.
  absl::Status status = session->Step(0, std::vector<float>(4), keys, std::vector<float>{2, 8}, out);
  if (!status.ok()) return std::cerr << status << "\n", 1;
  std::cout << "prefill " << out[0] << " " << out[1] << " " << out[2] << " " << out[3] << "\n";
  const bool prefill_right = out == std::vector<float>{2, 2, 5, 5};

  out.resize(2);
  status = session->Step(0, std::vector<float>(2), std::vector<float>(1), std::vector<float>{-1}, out);
  if (!status.ok()) return std::cerr << status << "\n", 1;
  std::cout << "decode " << out[0] << " " << out[1] << "\n";
  return prefill_right && std::abs(out[0] - 3) < 1e-5f && out[0] == out[1] ? 0 : 1;
}
