"""Compiled functions that run for real on a machine without a GPU, up to their launches: the
simulator's recorder, and the same CUDA runtime in C, for hosts that run under an emulator.
"""

from __future__ import annotations

from specplan.tools.simulator.host import Recorded, Recorder, on_gpu

__all__ = ["SOURCE", "Recorded", "Recorder", "on_gpu"]

#: CUDA's runtime as far as compiled functions call it. What is not here answers success.
SOURCE = """
#include <stdint.h>
#include <string.h>
static int64_t launches;
static uint32_t shape[6];
int64_t recorder_launches(uint32_t *last) { memcpy(last, shape, sizeof shape); return launches; }

int recorded_other(void) { return 0; }
const char *recorded_cudaGetErrorName(int code) { return "cudaErrorRecorded"; }
const char *recorded_cudaGetErrorString(int code) { return "an error of the recorder"; }
int recorded_cudaGetDevice(int *device) { *device = 0; return 0; }
int recorded_cudaGetDeviceCount(int *count) { *count = 1; return 0; }
int recorded_cudaDriverGetVersion(int *version) { *version = 13000; return 0; }
int recorded_cudaDeviceGetAttribute(int *value) { *value = 0; return 0; }
int recorded_cudaLibraryLoadData(void **library) { *library = shape; return 0; }
int recorded_cudaLibraryGetKernel(void **kernel) { *kernel = shape; return 0; }
static int driver(int *value) { *value = 0; return 0; }
int recorded_cudaGetDriverEntryPointByVersion(
    const char *name, void **function, unsigned version, unsigned long long flags, int *status)
{
    *function = driver;
    *status = 0;
    return 0;
}
int recorded_cudaLaunchKernelExC(const void *config, void *kernel, void **arguments)
{
    memcpy(shape, config, sizeof shape);
    launches++;
    return 0;
}
"""
