const int LANE = thread_index_in_simdgroup, WARP = simdgroup_index_in_threadgroup;
const int GROUP_X = threadgroup_position_in_grid.x, GROUP_Y = threadgroup_position_in_grid.y;
const int GROUP_Z = threadgroup_position_in_grid.z;
