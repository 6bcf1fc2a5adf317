/* A disk that fails on request: sits under every call that changes files below one directory.
 *
 * Loaded with LD_PRELOAD.  A shared mapping (the log) holds, for all processes of one machine, what
 * is to go wrong and a record of everything that was done, in the order in which it was done: the
 * disk as a power loss would leave it is computed from that.  Without a log attached, and for paths
 * elsewhere, every call goes straight through.
 *
 * fsync reaches no real disk here: what it promises is in the log, and nothing is slowed down.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

/* The same numbers as in shim.py. */
enum op {
    OP_CREATE = 1, OP_TRUNCATE, OP_WRITE, OP_GROW, OP_SYNC, OP_SYNC_FAILED, OP_MKDIR, OP_UNLINK,
    OP_RMDIR, OP_RENAME, OP_LINK, OP_CLOSE, OP_MARK, OP_SITE,
};
enum kind {
    K_NONE, K_COUNT, K_KILL_BEFORE, K_KILL_AFTER, K_TORN, K_ENOSPC_ONCE, K_ENOSPC_STICKY, K_EIO_ONCE,
    K_POWER, K_EIO_STICKY, K_REPEATED,
};
enum class { C_CHANGES, C_READS };
/* The driver has the last place: it is not on the machine that fails. */
enum { RANKS = 8, DRIVER = 7, NAME = 200 };

struct slot {
    _Atomic int kind, class, at, count, struck;
    int pid;
    char site[NAME];
};

struct header {
    _Atomic int lock, full, stopped, escaped, direct;
    int root_length;
    _Atomic long used;
    long capacity;
    struct slot rank[RANKS];
    char root[1024];
};

struct record {
    uint32_t size, op;
    int32_t rank, call;
    int64_t inode, directory, directory2, offset, length;
    uint32_t name1, name2, data, filler;
};

static struct header *log_;
static int me;

#define REAL(name) \
    static __typeof__(name) *real; \
    if (!real) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

/* ------------------------------------------------------------------ where a path or file lies */

static int below(const char *path) {
    int n = log_->root_length;
    return !strncmp(path, log_->root, n) && (path[n] == '/' || path[n] == 0);
}

static int link_of(const char *kind, int fd, char *out) {
    char proc[64];
    if (fd == AT_FDCWD) snprintf(proc, sizeof proc, "/proc/self/cwd");
    else snprintf(proc, sizeof proc, "/proc/self/%s/%d", kind, fd);
    long n = syscall(SYS_readlinkat, AT_FDCWD, proc, out, PATH_MAX - 1);
    if (n <= 0) return 0;
    out[n] = 0;
    return 1;
}

/* Whether the descriptor is of something below the root; its path in out. */
static int tracked_fd(int fd, char *out) {
    if (!log_ || fd < 0) return 0;
    int saved = errno, yes = link_of("fd", fd, out) && below(out);
    errno = saved;
    return yes;
}

static int tracked_path(int at, const char *path, char *out) {
    if (!log_ || !path) return 0;
    int saved = errno, yes = 0;
    if (path[0] == '/') {
        yes = below(path);
        if (yes) snprintf(out, PATH_MAX, "%s", path);
    } else {
        char base[PATH_MAX];
        if (link_of("fd", at, base) && below(base)) {
            yes = 1;
            if (snprintf(out, PATH_MAX, "%s/%s", base, path) >= PATH_MAX) abort();
        }
    }
    errno = saved;
    return yes;
}

static const char *leaf(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

static int64_t inode_of(const char *path) {
    struct stat found;
    return fstatat(AT_FDCWD, path, &found, AT_SYMLINK_NOFOLLOW) ? -1 : (int64_t)found.st_ino;
}

static int64_t parent_of(const char *path) {
    char folder[PATH_MAX];
    snprintf(folder, sizeof folder, "%s", path);
    char *slash = strrchr(folder, '/');
    if (!slash) return -1;
    *slash = 0;
    return inode_of(folder);
}

static int64_t inode_of_fd(int fd) {
    struct stat found;
    return fstat(fd, &found) ? -1 : (int64_t)found.st_ino;
}

static int writable(int fd) {
    int flags = fcntl(fd, F_GETFL);
    return flags >= 0 && (flags & O_ACCMODE) != O_RDONLY && !(flags & O_PATH);
}

static int direct(int fd) {
    int flags = fcntl(fd, F_GETFL);
    return flags >= 0 && (flags & O_DIRECT);
}

/* ------------------------------------------------------------------ the log */

static void lock(void) {
    int free_ = 0;
    while (!atomic_compare_exchange_weak(&log_->lock, &free_, 1)) {
        free_ = 0;
        sched_yield();
    }
}

static void unlock(void) { atomic_store(&log_->lock, 0); }

static void note(enum op op, int call, int64_t inode, int64_t dir, const char *name1, int64_t dir2,
                 const char *name2, int64_t offset, int64_t length, const struct iovec *parts,
                 int count) {
    struct record r = {0};
    int64_t data = 0;
    if (op == OP_WRITE) data = length;
    r.name1 = name1 ? strlen(name1) : 0;
    r.name2 = name2 ? strlen(name2) : 0;
    r.data = data;
    r.size = (sizeof r + r.name1 + r.name2 + data + 7) & ~7u;
    r.op = op, r.rank = me, r.call = call, r.inode = inode, r.directory = dir, r.directory2 = dir2;
    r.offset = offset, r.length = length;
    long at = log_->used;
    if (at + (long)r.size > log_->capacity) {
        fprintf(stderr, "crash shim: the log is full\n");
        abort();
    }
    char *to = (char *)log_ + at;
    memcpy(to, &r, sizeof r), to += sizeof r;
    memcpy(to, name1 ? name1 : "", r.name1), to += r.name1;
    memcpy(to, name2 ? name2 : "", r.name2), to += r.name2;
    for (int i = 0; i < count && data > 0; i++) {
        int64_t n = (int64_t)parts[i].iov_len < data ? (int64_t)parts[i].iov_len : data;
        memcpy(to, parts[i].iov_base, n), to += n, data -= n;
    }
    log_->used = at + r.size;
}

/* ------------------------------------------------------------------ what goes wrong */

struct verdict {
    int call;   /* number of this call among the rank's, or -1 */
    int error;  /* what to fail with */
    int torn, after, repeated;
};

static void die(void) {
    syscall(SYS_kill, getpid(), SIGKILL);
    for (;;) pause();
}

static void power_off(void) {
    /* The lock is kept: nobody does anything any more. */
    log_->stopped = 1;
    for (int i = 0; i < DRIVER; i++)
        if (i != me && log_->rank[i].pid > 0) syscall(SYS_kill, log_->rank[i].pid, SIGKILL);
    die();
}

/* Whether a full disk refuses such a call (a full disk still lets one delete, close and rename). */
/* CHANGES_NAMES: sent twice, the second answer is another one, such as that the name exists.  Not so
 * an open with O_EXCL: NFS sends a verifier, by which the server knows the file for the client's own
 * (RFC 1813, 3.3.8; RFC 8881, 18.16.3). */
enum { NEEDS_SPACE = 1, WRITES = 2, CHANGES_NAMES = 4 };

/* Takes the lock; end() gives it back. */
static struct verdict begin(enum class class, const char *call, const char *path, int traits) {
    struct verdict v = {.call = -1};
    lock();
    if (log_->stopped) die();
    struct slot *slot = &log_->rank[me];
    int kind = slot->kind;
    if (kind != K_NONE && slot->class == (int)class) {
        v.call = slot->count++;
        char site[NAME];
        snprintf(site, sizeof site, "%s %s", call, path + log_->root_length);
        if (kind == K_COUNT)
            note(OP_SITE, v.call, traits, 0, site, 0, NULL, 0, 0, NULL, 0);
        if (v.call == slot->at) {
            slot->struck = 1;
            memcpy(slot->site, site, sizeof site);
            switch (kind) {
            case K_KILL_BEFORE: unlock(); die(); break;
            case K_POWER: power_off(); break;
            case K_KILL_AFTER: v.after = 1; break;
            case K_TORN: v.torn = 1; break;
            case K_REPEATED: v.repeated = 1; break;
            case K_ENOSPC_ONCE: v.error = ENOSPC; break;
            case K_EIO_ONCE: v.error = EIO; break;
            case K_ENOSPC_STICKY: log_->full = 1; break;
            }
        }
        if (kind == K_EIO_STICKY && v.call >= slot->at) v.error = EIO;
    }
    if (log_->full && (traits & NEEDS_SPACE)) v.error = ENOSPC;
    return v;
}

static void end(struct verdict v) {
    unlock();
    if (v.after) die();
}

static long failed(struct verdict v) {
    end(v);
    errno = v.error;
    return -1;
}

/* ------------------------------------------------------------------ the calls */

static int opened(int at, const char *call, const char *given, int flags, mode_t mode) {
    static int (*real)(int, const char *, int, ...);
    if (!real) real = dlsym(RTLD_NEXT, "openat64");
    char path[PATH_MAX];
    if (!tracked_path(at, given, path)) return real(at, given, flags, mode);
    int changes = (flags & (O_CREAT | O_TRUNC)) || (flags & O_ACCMODE) != O_RDONLY;
    if ((flags & O_TMPFILE) == O_TMPFILE) log_->escaped = 1;
    struct verdict v = begin(changes ? C_CHANGES : C_READS, call, path,
                             flags & O_CREAT ? NEEDS_SPACE : 0);
    if (v.error) return failed(v);
    int existed = inode_of(path) >= 0;
    int fd = real(at, given, flags, mode), saved = errno;
    if (fd >= 0 && changes) {
        if (!existed)
            note(OP_CREATE, v.call, inode_of_fd(fd), parent_of(path), leaf(path), 0, NULL, 0, 0,
                 NULL, 0);
        else if (flags & O_TRUNC)
            note(OP_TRUNCATE, v.call, inode_of_fd(fd), 0, NULL, 0, NULL, 0, 0, NULL, 0);
    }
    end(v);
    errno = saved;
    return fd;
}

static mode_t mode_of(int flags, va_list rest) {
    return (flags & O_CREAT) || (flags & O_TMPFILE) == O_TMPFILE ? va_arg(rest, mode_t) : 0;
}

#define OPEN(name)                                                \
    int name(const char *path, int flags, ...) {                  \
        va_list rest;                                             \
        va_start(rest, flags);                                    \
        mode_t mode = mode_of(flags, rest);                       \
        va_end(rest);                                             \
        return opened(AT_FDCWD, "open", path, flags, mode);       \
    }
#define OPENAT(name)                                              \
    int name(int at, const char *path, int flags, ...) {          \
        va_list rest;                                             \
        va_start(rest, flags);                                    \
        mode_t mode = mode_of(flags, rest);                       \
        va_end(rest);                                             \
        return opened(at, "open", path, flags, mode);             \
    }
OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)
int __open_2(const char *path, int flags) { return opened(AT_FDCWD, "open", path, flags, 0); }
int __open64_2(const char *path, int flags) { return opened(AT_FDCWD, "open", path, flags, 0); }
int creat(const char *path, mode_t mode) {
    return opened(AT_FDCWD, "open", path, O_CREAT | O_WRONLY | O_TRUNC, mode);
}
int creat64(const char *path, mode_t mode) { return creat(path, mode); }

/* What stdio writes never comes by here: the check of the log against the folder would find it, */
/* this says so at once. */
#define FOPEN(name)                                                              \
    FILE *name(const char *path, const char *mode) {                             \
        REAL(name);                                                              \
        char full[PATH_MAX];                                                     \
        if (tracked_path(AT_FDCWD, path, full) && strpbrk(mode, "wa+"))          \
            log_->escaped = 1;                                                   \
        return real(path, mode);                                                 \
    }
FOPEN(fopen)
FOPEN(fopen64)

static ssize_t written(int fd, const char *call, const char *path, const struct iovec *parts,
                       int count, off_t at) {
    static ssize_t (*real)(int, const struct iovec *, int);
    static ssize_t (*real_at)(int, const struct iovec *, int, off_t);
    if (!real) real = dlsym(RTLD_NEXT, "writev");
    if (!real_at) real_at = dlsym(RTLD_NEXT, "pwritev64");
    struct verdict v = begin(C_CHANGES, call, path, NEEDS_SPACE | WRITES);
    if (v.error) return failed(v);
    off_t offset = at;
    struct stat found;
    if (at < 0) {
        offset = lseek(fd, 0, SEEK_CUR);
        if ((fcntl(fd, F_GETFL) & O_APPEND) && !fstat(fd, &found)) offset = found.st_size;
    }
    if (direct(fd)) log_->direct++;
    if (v.torn) {
        size_t total = 0, half;
        for (int i = 0; i < count; i++) total += parts[i].iov_len;
        half = total / 2;
        fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) & ~O_DIRECT);
        for (int i = 0; i < count && half > 0; i++) {
            size_t n = parts[i].iov_len < half ? parts[i].iov_len : half;
            ssize_t done = syscall(SYS_pwrite64, fd, parts[i].iov_base, n, offset);
            if (done != (ssize_t)n) abort();
            struct iovec one = {parts[i].iov_base, n};
            note(OP_WRITE, v.call, inode_of_fd(fd), 0, NULL, 0, NULL, offset, n, &one, 1);
            offset += n, half -= n;
        }
        unlock();
        die();
    }
    ssize_t done = at < 0 ? real(fd, parts, count) : real_at(fd, parts, count, at);
    int saved = errno;
    if (done > 0)
        note(OP_WRITE, v.call, inode_of_fd(fd), 0, NULL, 0, NULL, offset, done, parts, count);
    end(v);
    errno = saved;
    return done;
}

ssize_t write(int fd, const void *data, size_t size) {
    REAL(write);
    char path[PATH_MAX];
    if (!tracked_fd(fd, path)) return real(fd, data, size);
    struct iovec one = {(void *)data, size};
    return written(fd, "write", path, &one, 1, -1);
}

#define PWRITE(name, offset_t)                                               \
    ssize_t name(int fd, const void *data, size_t size, offset_t at) {       \
        REAL(name);                                                          \
        char path[PATH_MAX];                                                 \
        if (!tracked_fd(fd, path)) return real(fd, data, size, at);          \
        struct iovec one = {(void *)data, size};                             \
        return written(fd, "pwrite", path, &one, 1, at);                     \
    }
PWRITE(pwrite, off_t)
PWRITE(pwrite64, off64_t)

ssize_t writev(int fd, const struct iovec *parts, int count) {
    REAL(writev);
    char path[PATH_MAX];
    if (!tracked_fd(fd, path)) return real(fd, parts, count);
    return written(fd, "writev", path, parts, count, -1);
}

#define PWRITEV(name, offset_t)                                                  \
    ssize_t name(int fd, const struct iovec *parts, int count, offset_t at) {    \
        REAL(name);                                                              \
        char path[PATH_MAX];                                                     \
        if (!tracked_fd(fd, path)) return real(fd, parts, count, at);            \
        return written(fd, "pwritev", path, parts, count, at);                   \
    }
PWRITEV(pwritev, off_t)
PWRITEV(pwritev64, off64_t)

#define PWRITEV2(name, offset_t)                                                           \
    ssize_t name(int fd, const struct iovec *parts, int count, offset_t at, int flags) {   \
        REAL(name);                                                                        \
        char path[PATH_MAX];                                                               \
        if (!tracked_fd(fd, path)) return real(fd, parts, count, at, flags);               \
        return written(fd, "pwritev", path, parts, count, at);                             \
    }
PWRITEV2(pwritev2, off_t)
PWRITEV2(pwritev64v2, off64_t)

static int cut(int fd, int64_t inode, const char *path, off_t size) {
    struct verdict v = begin(C_CHANGES, "ftruncate", path, 0);
    if (v.error) return failed(v);
    int done = fd >= 0 ? syscall(SYS_ftruncate, fd, size) : syscall(SYS_truncate, path, size);
    int saved = errno;
    if (!done) note(OP_TRUNCATE, v.call, inode, 0, NULL, 0, NULL, 0, size, NULL, 0);
    end(v);
    errno = saved;
    return done;
}

#define FTRUNCATE(name, offset_t)                                          \
    int name(int fd, offset_t size) {                                      \
        char path[PATH_MAX];                                               \
        if (!tracked_fd(fd, path)) return syscall(SYS_ftruncate, fd, size);\
        return cut(fd, inode_of_fd(fd), path, size);                       \
    }
FTRUNCATE(ftruncate, off_t)
FTRUNCATE(ftruncate64, off64_t)

#define TRUNCATE(name, offset_t)                                                     \
    int name(const char *given, offset_t size) {                                     \
        char path[PATH_MAX];                                                         \
        if (!tracked_path(AT_FDCWD, given, path)) return syscall(SYS_truncate, given, size); \
        return cut(-1, inode_of(path), path, size);                                  \
    }
TRUNCATE(truncate, off_t)
TRUNCATE(truncate64, off64_t)

static int grown(int fd, const char *path, int mode, off_t at, off_t size) {
    struct verdict v = begin(C_CHANGES, "fallocate", path, NEEDS_SPACE);
    if (v.error) return failed(v);
    int done = syscall(SYS_fallocate, fd, mode, at, size), saved = errno;
    if (!done && mode == 0)
        note(OP_GROW, v.call, inode_of_fd(fd), 0, NULL, 0, NULL, 0, at + size, NULL, 0);
    else if (!done && !(mode & FALLOC_FL_KEEP_SIZE)) log_->escaped = 1;
    end(v);
    errno = saved;
    return done;
}

#define FALLOCATE(name, offset_t)                                                         \
    int name(int fd, int mode, offset_t at, offset_t size) {                              \
        char path[PATH_MAX];                                                              \
        if (!tracked_fd(fd, path)) return syscall(SYS_fallocate, fd, mode, at, size);     \
        return grown(fd, path, mode, at, size);                                           \
    }
FALLOCATE(fallocate, off_t)
FALLOCATE(fallocate64, off64_t)

#define POSIX_FALLOCATE(name, offset_t)                                            \
    int name(int fd, offset_t at, offset_t size) {                                 \
        REAL(name);                                                                \
        char path[PATH_MAX];                                                       \
        if (!tracked_fd(fd, path)) return real(fd, at, size);                      \
        return grown(fd, path, 0, at, size) ? errno : 0;                           \
    }
POSIX_FALLOCATE(posix_fallocate, off_t)
POSIX_FALLOCATE(posix_fallocate64, off64_t)

static int synced(int fd, const char *call, const char *path) {
    struct verdict v = begin(C_CHANGES, call, path, 0);
    /* The kernel drops what it could not write, and says so once. */
    note(v.error ? OP_SYNC_FAILED : OP_SYNC, v.call, inode_of_fd(fd), 0, NULL, 0, NULL, 0, 0, NULL,
         0);
    if (v.error) return failed(v);
    end(v);
    return 0;
}

#define FSYNC(name)                                        \
    int name(int fd) {                                     \
        REAL(name);                                        \
        char path[PATH_MAX];                               \
        if (!tracked_fd(fd, path)) return real(fd);        \
        return synced(fd, #name, path);                    \
    }
FSYNC(fsync)
FSYNC(fdatasync)

int close(int fd) {
    char path[PATH_MAX];
    if (!tracked_fd(fd, path) || !writable(fd)) return syscall(SYS_close, fd);
    struct verdict v = begin(C_CHANGES, "close", path, 0);
    int done = syscall(SYS_close, fd), saved = errno; /* the descriptor is gone in any case */
    if (v.error) return failed(v);
    end(v);
    errno = saved;
    return done;
}

static int renamed(int at, const char *from, int at2, const char *to, unsigned flags) {
    char path[PATH_MAX], path2[PATH_MAX];
    int tracked = tracked_path(at, from, path), tracked2 = tracked_path(at2, to, path2);
    if (!log_ || (!tracked && !tracked2)) return syscall(SYS_renameat2, at, from, at2, to, flags);
    if (!tracked || !tracked2 || (flags & ~RENAME_NOREPLACE)) log_->escaped = 1;
    struct verdict v = begin(C_CHANGES, "rename", tracked2 ? path2 : path, CHANGES_NAMES);
    if (v.error) return failed(v);
    int64_t inode = inode_of(path);
    int done = syscall(SYS_renameat2, at, from, at2, to, flags), saved = errno;
    if (!done)
        note(OP_RENAME, v.call, inode, parent_of(path), leaf(path), parent_of(path2), leaf(path2),
             0, 0, NULL, 0);
    if (!done && v.repeated)
        done = syscall(SYS_renameat2, at, from, at2, to, flags), saved = errno;
    end(v);
    errno = saved;
    return done;
}
int rename(const char *from, const char *to) { return renamed(AT_FDCWD, from, AT_FDCWD, to, 0); }
int renameat(int at, const char *from, int at2, const char *to) {
    return renamed(at, from, at2, to, 0);
}
int renameat2(int at, const char *from, int at2, const char *to, unsigned flags) {
    return renamed(at, from, at2, to, flags);
}

static int removed(int at, const char *given, int flags) {
    char path[PATH_MAX];
    if (!tracked_path(at, given, path)) return syscall(SYS_unlinkat, at, given, flags);
    int folder = flags & AT_REMOVEDIR;
    struct verdict v = begin(C_CHANGES, folder ? "rmdir" : "unlink", path, CHANGES_NAMES);
    if (v.error) return failed(v);
    int64_t inode = inode_of(path);
    int done = syscall(SYS_unlinkat, at, given, flags), saved = errno;
    if (!done)
        note(folder ? OP_RMDIR : OP_UNLINK, v.call, inode, parent_of(path), leaf(path), 0, NULL, 0,
             0, NULL, 0);
    if (!done && v.repeated) done = syscall(SYS_unlinkat, at, given, flags), saved = errno;
    end(v);
    errno = saved;
    return done;
}
int unlink(const char *path) { return removed(AT_FDCWD, path, 0); }
int unlinkat(int at, const char *path, int flags) { return removed(at, path, flags); }
int rmdir(const char *path) { return removed(AT_FDCWD, path, AT_REMOVEDIR); }
int remove(const char *path) {
    REAL(remove);
    char full[PATH_MAX];
    struct stat found;
    if (!tracked_path(AT_FDCWD, path, full)) return real(path);
    int folder = !fstatat(AT_FDCWD, full, &found, AT_SYMLINK_NOFOLLOW) && S_ISDIR(found.st_mode);
    return removed(AT_FDCWD, path, folder ? AT_REMOVEDIR : 0);
}

static int made(int at, const char *given, mode_t mode) {
    char path[PATH_MAX];
    if (!tracked_path(at, given, path)) return syscall(SYS_mkdirat, at, given, mode);
    struct verdict v = begin(C_CHANGES, "mkdir", path, NEEDS_SPACE | CHANGES_NAMES);
    if (v.error) return failed(v);
    int done = syscall(SYS_mkdirat, at, given, mode), saved = errno;
    if (!done)
        note(OP_MKDIR, v.call, inode_of(path), parent_of(path), leaf(path), 0, NULL, 0, 0, NULL, 0);
    if (!done && v.repeated) done = syscall(SYS_mkdirat, at, given, mode), saved = errno;
    end(v);
    errno = saved;
    return done;
}
int mkdir(const char *path, mode_t mode) { return made(AT_FDCWD, path, mode); }
int mkdirat(int at, const char *path, mode_t mode) { return made(at, path, mode); }

static int linked(int at, const char *from, int at2, const char *to, int flags) {
    char path[PATH_MAX], path2[PATH_MAX];
    if (!tracked_path(at2, to, path2)) return syscall(SYS_linkat, at, from, at2, to, flags);
    if (!tracked_path(at, from, path)) log_->escaped = 1;
    struct verdict v = begin(C_CHANGES, "link", path2, NEEDS_SPACE | CHANGES_NAMES);
    if (v.error) return failed(v);
    int done = syscall(SYS_linkat, at, from, at2, to, flags), saved = errno;
    if (!done)
        note(OP_LINK, v.call, inode_of(path2), parent_of(path2), leaf(path2), 0, NULL, 0, 0, NULL,
             0);
    if (!done && v.repeated) done = syscall(SYS_linkat, at, from, at2, to, flags), saved = errno;
    end(v);
    errno = saved;
    return done;
}
int link(const char *from, const char *to) { return linked(AT_FDCWD, from, AT_FDCWD, to, 0); }
int linkat(int at, const char *from, int at2, const char *to, int flags) {
    return linked(at, from, at2, to, flags);
}

/* ------------------------------------------------------------------ ways around, told of */

int symlinkat(const char *to, int at, const char *given) {
    char path[PATH_MAX];
    if (tracked_path(at, given, path)) log_->escaped = 1;
    return syscall(SYS_symlinkat, to, at, given);
}
int symlink(const char *to, const char *given) { return symlinkat(to, AT_FDCWD, given); }

#define MMAP(name, offset_t)                                                              \
    void *name(void *at, size_t size, int protection, int flags, int fd, offset_t from) { \
        char path[PATH_MAX];                                                              \
        if (fd >= 0 && (flags & MAP_SHARED) && (protection & PROT_WRITE) &&               \
            tracked_fd(fd, path))                                                         \
            log_->escaped = 1;                                                            \
        return (void *)syscall(SYS_mmap, at, size, protection, flags, fd, from);          \
    }
MMAP(mmap, off_t)
MMAP(mmap64, off64_t)

ssize_t copy_file_range(int from, off64_t *at, int to, off64_t *at2, size_t size, unsigned flags) {
    char path[PATH_MAX];
    if (tracked_fd(to, path)) log_->escaped = 1;
    return syscall(SYS_copy_file_range, from, at, to, at2, size, flags);
}

#define SENDFILE(name, offset_t)                                          \
    ssize_t name(int to, int from, offset_t *at, size_t size) {           \
        char path[PATH_MAX];                                              \
        if (tracked_fd(to, path)) log_->escaped = 1;                      \
        return syscall(SYS_sendfile, to, from, at, size);                 \
    }
SENDFILE(sendfile, off_t)
SENDFILE(sendfile64, off64_t)

/* ------------------------------------------------------------------ reading */

static ssize_t got(int fd, const char *path, const struct iovec *parts, int count, off_t at) {
    static ssize_t (*real)(int, const struct iovec *, int);
    static ssize_t (*real_at)(int, const struct iovec *, int, off_t);
    if (!real) real = dlsym(RTLD_NEXT, "readv");
    if (!real_at) real_at = dlsym(RTLD_NEXT, "preadv64");
    struct verdict v = begin(C_READS, "read", path, WRITES);
    if (v.error) return failed(v);
    off_t before = at < 0 ? lseek(fd, 0, SEEK_CUR) : 0;
    ssize_t done = at < 0 ? real(fd, parts, count) : real_at(fd, parts, count, at);
    int saved = errno;
    if (v.torn && done > 1) { /* half of it, as a signal in between would do */
        done /= 2;
        if (at < 0) lseek(fd, before + done, SEEK_SET);
    }
    end(v);
    errno = saved;
    return done;
}

ssize_t read(int fd, void *data, size_t size) {
    REAL(read);
    char path[PATH_MAX];
    if (!tracked_fd(fd, path)) return real(fd, data, size);
    struct iovec one = {data, size};
    return got(fd, path, &one, 1, -1);
}

#define PREAD(name, offset_t)                                             \
    ssize_t name(int fd, void *data, size_t size, offset_t at) {          \
        REAL(name);                                                       \
        char path[PATH_MAX];                                              \
        if (!tracked_fd(fd, path)) return real(fd, data, size, at);       \
        struct iovec one = {data, size};                                  \
        return got(fd, path, &one, 1, at);                                \
    }
PREAD(pread, off_t)
PREAD(pread64, off64_t)

#define PREADV(name, offset_t)                                                    \
    ssize_t name(int fd, const struct iovec *parts, int count, offset_t at) {     \
        REAL(name);                                                               \
        char path[PATH_MAX];                                                      \
        if (!tracked_fd(fd, path)) return real(fd, parts, count, at);             \
        return got(fd, path, parts, count, at);                                   \
    }
PREADV(preadv, off_t)
PREADV(preadv64, off64_t)

#define PREADV2(name, offset_t)                                                           \
    ssize_t name(int fd, const struct iovec *parts, int count, offset_t at, int flags) {  \
        REAL(name);                                                                       \
        char path[PATH_MAX];                                                              \
        if (!tracked_fd(fd, path)) return real(fd, parts, count, at, flags);              \
        return got(fd, path, parts, count, at);                                           \
    }
PREADV2(preadv2, off_t)
PREADV2(preadv64v2, off64_t)

DIR *opendir(const char *given) {
    REAL(opendir);
    char path[PATH_MAX];
    if (!tracked_path(AT_FDCWD, given, path)) return real(given);
    struct verdict v = begin(C_READS, "opendir", path, 0);
    if (v.error) {
        failed(v);
        return NULL;
    }
    DIR *found = real(given);
    int saved = errno;
    end(v);
    errno = saved;
    return found;
}

/* ------------------------------------------------------------------ for shim.py, through ctypes */

/* Begin or join a log; an empty root joins.  Returns 0, or an errno. */
int crash_attach(const char *file, const char *root, long capacity) {
    if (log_) syscall(SYS_munmap, log_, log_->capacity);
    log_ = NULL;
    if (!file[0]) return 0;
    int fd = syscall(SYS_openat, AT_FDCWD, file, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0) return errno;
    struct header *found = NULL;
    struct stat size;
    if (root[0] && syscall(SYS_ftruncate, fd, capacity)) goto wrong;
    if (fstat(fd, &size)) goto wrong;
    found = (void *)syscall(SYS_mmap, 0, size.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (found == MAP_FAILED) goto wrong;
    syscall(SYS_close, fd);
    if (root[0]) {
        memset(found, 0, sizeof *found);
        found->used = sizeof *found;
        found->capacity = size.st_size;
        found->root_length = strlen(root);
        snprintf(found->root, sizeof found->root, "%s", root);
    }
    log_ = found;
    return 0;
wrong:
    syscall(SYS_close, fd);
    return errno ? errno : EINVAL;
}

void crash_rank(int rank) {
    me = rank;
    log_->rank[rank].pid = getpid();
}

void crash_arm(int rank, int kind, int class, int at) {
    struct slot *slot = &log_->rank[rank];
    slot->kind = K_NONE;
    slot->class = class;
    slot->at = at;
    slot->count = 0;
    slot->struck = 0;
    slot->site[0] = 0;
    slot->kind = kind;
}

/* Nothing goes wrong any more; what struck is still known. */
void crash_disarm(void) {
    for (int i = 0; i < RANKS; i++) log_->rank[i].kind = K_NONE;
    log_->full = 0;
}

/* The processes are gone: whoever held the lock does so no more. */
void crash_recover(void) {
    for (int i = 0; i < RANKS; i++) log_->rank[i].pid = 0;
    log_->stopped = 0;
    atomic_store(&log_->lock, 0);
}

void crash_mark(long value) {
    lock();
    if (log_->stopped) die();
    note(OP_MARK, -1, 0, 0, NULL, 0, NULL, 0, value, NULL, 0);
    unlock();
}

int crash_struck(int rank) { return log_->rank[rank].struck; }
const char *crash_site(int rank) { return log_->rank[rank].site; }
int crash_escaped(void) { return log_->escaped; }
int crash_direct_writes(void) { return log_->direct; }
long crash_used(void) { return log_->used; }
long crash_header(void) { return sizeof(struct header); }
