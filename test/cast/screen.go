package cast

import (
	"fmt"
	"image/color"
	"io"
	"strings"

	uv "github.com/charmbracelet/ultraviolet"
	"github.com/charmbracelet/x/ansi"
	"github.com/charmbracelet/x/vt"
)

// Screen is a terminal that shows output. The caller closes it.
type Screen struct {
	term *vt.Emulator
	done chan struct{}
}

// NewScreen returns an empty terminal.
func NewScreen(width, height int) *Screen {
	s := &Screen{vt.NewEmulator(width, height), make(chan struct{})}
	go func() { // a terminal answers queries; the answers are not needed
		defer close(s.done)
		_, _ = io.Copy(io.Discard, s.term)
	}()
	return s
}

// Write shows output.
func (s *Screen) Write(text string) { _, _ = s.term.WriteString(text) }

// Close ends the terminal. It closes the pipe of the answers: Close of the emulator sets a
// variable that the goroutine reads.
func (s *Screen) Close() {
	if pipe, ok := s.term.InputPipe().(io.Closer); ok {
		_ = pipe.Close()
	}
	<-s.done
}

// Text returns what the terminal shows, without trailing spaces and lines.
func (s *Screen) Text() string {
	var out strings.Builder
	for y := range s.term.Height() {
		var line strings.Builder
		for x := 0; x < s.term.Width(); {
			content, _, width := s.cell(x, y)
			line.WriteString(content)
			x += width
		}
		out.WriteString(strings.TrimRight(line.String(), " ") + "\n")
	}
	return strings.TrimRight(out.String(), "\n")
}

// cell returns the content, style and width of a cell.
func (s *Screen) cell(x, y int) (content string, style uv.Style, width int) {
	c := s.term.CellAt(x, y)
	if c == nil || c.Content == "" {
		if c != nil {
			style = c.Style
		}
		return " ", style, 1
	}
	return c.Content, c.Style, max(1, c.Width)
}

// palette are the 16 basic colors, and the default ones.
var palette = [16]string{
	"#1b1f27", "#e06c75", "#7cc379", "#d9b56c", "#6fa8f0", "#c58af0", "#56b6c2", "#c9ced6",
	"#6b7280", "#ff8a92", "#98d995", "#f0cf8a", "#8fc1ff", "#dba6ff", "#7fd3dd", "#ffffff",
}

const foreground, background = "#d3d7de", "#14171d"

// hex returns a color of a cell; "" for nil.
func hex(c color.Color) string {
	if c == nil {
		return ""
	}
	if basic, ok := c.(ansi.BasicColor); ok {
		return palette[basic&15]
	}
	r, g, b, _ := c.RGBA()
	return fmt.Sprintf("#%02x%02x%02x", r>>8, g>>8, b>>8)
}

// look is how a run of cells is drawn; "" is a default color.
type look struct{ fill, back, attributes string }

func lookOf(s uv.Style) look {
	l := look{fill: hex(s.Fg), back: hex(s.Bg)}
	if s.Attrs&uv.AttrReverse != 0 {
		l.fill, l.back = orElse(l.back, background), orElse(l.fill, foreground)
	}
	if s.Attrs&uv.AttrBold != 0 {
		l.attributes += ` font-weight="bold"`
	}
	if s.Attrs&uv.AttrItalic != 0 {
		l.attributes += ` font-style="italic"`
	}
	if s.Attrs&uv.AttrFaint != 0 {
		l.attributes += ` opacity=".6"`
	}
	if s.Underline != 0 {
		l.attributes += ` text-decoration="underline"`
	}
	return l
}

func orElse(s, other string) string {
	if s == "" {
		return other
	}
	return s
}
