"""The wire contract's generated messages and stubs: ``attnd_pb2``, ``attnd_pb2_grpc``, ``error_details_pb2``."""
