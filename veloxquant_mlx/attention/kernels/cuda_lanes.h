const int LANE = threadIdx.x & 31, WARP = threadIdx.x >> 5, GROUP_X = blockIdx.x, GROUP_Y = blockIdx.y, GROUP_Z = blockIdx.z;
