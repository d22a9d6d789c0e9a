// The numeric contract as a client sees it: what the server keeps of a value, and how far an answer may be off.
#ifndef ATTND_CLIENT_TOOL_STORED_H_
#define ATTND_CLIENT_TOOL_STORED_H_

#include <span>

#include "client/cpp/types.h"

namespace attnd::tool {

// Rows of `dim` values as the server stores them: the numeric contract is against those.
void RoundAsStored(client::KvDType dtype, int dim, std::span<float> values);

// Query rows of `dim` values as they are multiplied: a BF16 session multiplies BF16 by BF16.
void RoundAsMultiplied(client::KvDType dtype, int dim, std::span<float> queries);

// ||out - reference|| / ||reference|| of one row; infinite when the answer is not finite.
double RelativeError(const float* out, const double* reference, int dim);

// The most that RelativeError may be for a session of that dtype.
double ErrorBound(client::KvDType dtype);

}  // namespace attnd::tool

#endif  // ATTND_CLIENT_TOOL_STORED_H_
