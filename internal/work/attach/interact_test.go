package attach

import (
	"bytes"
	"io"
	"testing"

	"github.com/creack/pty"
)

// Output of a guest is filtered on a terminal, and exact elsewhere.
func TestGuestOutputIsFilteredOnATerminal(t *testing.T) {
	const text = "a\x1b]52;c;?\a\x1b[21tb"
	var file bytes.Buffer
	_, _ = FilteredWriter(&file).Write([]byte(text))
	if file.String() != text {
		t.Errorf("a file has %q", &file)
	}
	ptmx, tty, err := pty.Open()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = ptmx.Close() }()
	_, _ = FilteredWriter(tty).Write([]byte(text))
	got := make([]byte, 2)
	if _, err := io.ReadFull(ptmx, got); err != nil || string(got) != "ab" {
		t.Errorf("a terminal has %q, %v", got, err)
	}
	_ = tty.Close()
}
