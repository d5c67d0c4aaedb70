/* What a pack's library holds beside the compiler's objects: the functions of CUDA's runtime that
 * its code calls, forwarded to addresses that the loader hands over.
 *
 * specplan takes the addresses from the CUDA runtime that torch itself is bound to, so a pack can
 * bind no other one, and a machine without CUDA opens packs too: there every function answers
 * cudaErrorNoDevice. The build defines FUNCTIONS(F): F(index, name, unbound) for each function that
 * is called, and COUNT. No header is included, so that any host can be compiled for.
 */

#define CUDA_ERROR_NO_DEVICE 100

__attribute__((unused)) static int no_cuda(void) { return CUDA_ERROR_NO_DEVICE; }
__attribute__((unused)) static const char *no_cuda_text(void)
{
    return "no CUDA runtime: this process has a torch without CUDA";
}

typedef void (*function)(void);

#define ADDRESS(index, name, unbound) (function)unbound,
#define NAME(index, name, unbound) #name,
/* Read by the forwarders below, which are written in assembly to pass any arguments on. */
__attribute__((used, visibility("hidden"))) function specplan_functions[COUNT] = {FUNCTIONS(ADDRESS)};
static const function unbound_functions[COUNT] = {FUNCTIONS(ADDRESS)};
static const char *const names[COUNT] = {FUNCTIONS(NAME)};

#if defined(__x86_64__)
#define JUMP(index) "jmp *specplan_functions+8*" #index "(%rip)\n"
#elif defined(__aarch64__)
#define JUMP(index)                                       \
    "adrp x16, specplan_functions+8*" #index "\n"         \
    "ldr x16, [x16, #:lo12:specplan_functions+8*" #index "]\n" \
    "br x16\n"
#else
#error "packs are built for x86_64 and aarch64"
#endif

#define FORWARD(index, name, unbound)                                           \
    __asm__(".text\n.p2align 4\n.globl " #name "\n.hidden " #name "\n.type " #name \
            ",%function\n" #name ":\n" JUMP(index) ".size " #name ", .-" #name "\n");
FUNCTIONS(FORWARD)

static int same(const char *a, const char *b)
{
    while (*a && *a == *b)
        a++, b++;
    return *a == *b;
}

/* Hand over one function, or take it back with a null address; 0 if the code does not call it. */
int specplan_cuda_bind(const char *name, void *address)
{
    for (int i = 0; i < COUNT; i++)
        if (same(names[i], name)) {
            specplan_functions[i] = address ? (function)address : unbound_functions[i];
            return 1;
        }
    return 0;
}

/* How many functions have not been handed over. */
int specplan_cuda_unbound(void)
{
    int count = 0;
    for (int i = 0; i < COUNT; i++)
        count += specplan_functions[i] == unbound_functions[i];
    return count;
}

/* Turn a CUDA error into tvm-ffi's raised error. The compiler's runtime library has this function
 * and its static library lacks it; the prototype is in its CuteDSLRuntime.h.
 */
__attribute__((visibility("hidden"))) void CuteDSLRT_TVMFFISetRaisedCudaError(
    void (*set_error)(const char *kind, const char **parts, int count), int code)
{
    char digits[12];
    char *at = digits + sizeof digits;
    unsigned left = code < 0 ? 0u - (unsigned)code : (unsigned)code;
    *--at = 0;
    do {
        *--at = (char)('0' + left % 10);
        left /= 10;
    } while (left);
    if (code < 0)
        *--at = '-';
    const char *parts[] = {"CUDA Error Code: ", at};
    set_error("CUDADialectError", parts, 2);
}
